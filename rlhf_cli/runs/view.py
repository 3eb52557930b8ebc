"""Implementation of `rlhf view`: serves the page until a signal."""

import asyncio
import secrets
import socket
import sys
from contextlib import closing
from pathlib import Path

from aiohttp import web

from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.commands.view import ViewConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.recorded_runs import read_run
from rlhf_cli.runs.server_address import listening
from rlhf_cli.tracking.view.app import view_app
from rlhf_cli.tracking.view.runs import ViewedRuns, checked_folders

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.2
"""Time between two looks for a stop signal."""


def run_view(config: ViewConfig) -> None:
    """Serve until Ctrl-C or SIGTERM, then exit with status 130."""
    stop = StopSignal()
    viewed = ViewedRuns(checked_folders(config.view.runs), _state)
    with closing(viewed) as runs, listening(_HOST, config.view.port) as listener:
        key = secrets.token_urlsafe(24)
        asyncio.run(_serve(view_app(runs, key=key), listener, key, stop))
    sys.exit(INTERRUPTED)


def _state(root: Path) -> str:
    try:
        return read_run(root).state
    except UsageError:  # it is being written
        return "running"


async def _serve(app: web.Application, listener: socket.socket, key: str, stop: StopSignal) -> None:
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    print(f"Open http://{_HOST}:{listener.getsockname()[1]}/{key}/ (Ctrl-C ends it)", flush=True)
    while not stop():
        await asyncio.sleep(_LOOK_SECONDS)
    await runner.cleanup()
