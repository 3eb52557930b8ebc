"""Implementation of `rlhf view`: serves the page until a signal."""

import asyncio
import secrets
import socket
import sys
from contextlib import closing

from aiohttp import web

from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.commands.view import ViewConfig
from rlhf_cli.runs.server_address import listening
from rlhf_cli.tracking.view.app import view_app
from rlhf_cli.tracking.view.runs import ViewedRuns, checked_folders

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.2
"""Time between two looks for a stop signal."""


def run_view(config: ViewConfig) -> None:
    """Serve until Ctrl-C or SIGTERM, then exit with status 130."""
    stop = StopSignal()
    with closing(ViewedRuns(checked_folders(config.view.runs))) as runs, listening(_HOST, config.view.port) as listener:
        key = secrets.token_urlsafe(24)
        asyncio.run(_serve(view_app(runs, key=key), listener, key, stop))
    sys.exit(INTERRUPTED)


async def _serve(app: web.Application, listener: socket.socket, key: str, stop: StopSignal) -> None:
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    print(f"Open http://{_HOST}:{listener.getsockname()[1]}/{key}/ (Ctrl-C ends it)", flush=True)
    while not stop():
        await asyncio.sleep(_LOOK_SECONDS)
    await runner.cleanup()
