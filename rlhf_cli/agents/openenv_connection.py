"""One WebSocket connection to an OpenEnv server: a message, its answer, and the kinds of failure."""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from rlhf_cli.agents.server_key import KEY_ADVICE, NEEDS_KEY
from rlhf_cli.agents.session_environments import SessionFailed
from rlhf_cli.errors import LONGEST_REASON
from rlhf_cli.rewards.remote.call import BUSY, NO_SERVER_BEHIND, connection_failure

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message that is read: a broken server must not fill the memory."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds before a session is asked for again; doubled each time."""
CLOSE_SECONDS = 2.0  # for a server to agree to the end of a connection

_QUOTED = 200  # characters of a message that is not understood


class NotNow(Exception):
    """The server has no session now, and may have one later; the message completes a sentence about it."""


class Refused(SessionFailed):
    """The server does not take an action; the session goes on. The message has the reason alone."""


class Connection:
    """A connection, which is one session."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def begin(self, kind: str, data: Mapping[str, Any] | None, *, seconds: float) -> dict[str, Any]:
        """Connect and ask, again and again for so many seconds: a server has room again, or begins again.

        Raises:
            NotNow: the server had no session all the time.
            SessionFailed: another answer than the one that was asked for.
        """
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
        while True:
            try:
                await self.open()
                return await self.ask(kind, data)
            except NotNow:
                await self.close()
                if time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def open(self) -> None:
        """Connect. Raises NotNow if the server cannot be reached, SessionFailed if it takes no WebSocket."""
        self._received: asyncio.Queue[str | SessionFailed] = asyncio.Queue()
        try:
            self._socket = await self._http.ws_connect(
                self._url, max_msg_size=MAX_MESSAGE_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS)
            )
        except aiohttp.WSServerHandshakeError as error:
            advice = f": {KEY_ADVICE}" if error.status in NEEDS_KEY else ""
            reason = f"answered with status {error.status} at /ws{advice}"
            raise (NotNow if error.status in BUSY | NO_SERVER_BEHIND else SessionFailed)(reason) from None
        except aiohttp.ClientError as error:
            raise NotNow(str(connection_failure(error))) from None
        self._reader = asyncio.create_task(self._read(self._socket))

    async def ask(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a message, with data if it has some, and return the `data` of its answer.

        Raises NotNow, Refused or SessionFailed.
        """
        assert self._socket is not None
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # the reason of its end is read
            await self._socket.send_json({"type": kind} if data is None else {"type": kind, "data": data})
        received = await self._received.get()
        if isinstance(received, SessionFailed):
            raise received
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(received):
                case {"type": "observation" | "state", "data": dict() as found}:
                    return found
                case {"type": "error", "data": dict() as found}:
                    raise _failure(found)
        raise SessionFailed(f"sent a message that is no observation: {received[:_QUOTED]}")

    async def close(self) -> None:
        """End the connection, if there is one."""
        if self._socket is not None:
            await self._socket.close()
            self._reader.cancel()
            self._socket = None

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Read at all times: aiohttp answers pings only while it reads, and servers end connections without answers."""
        message = await socket.receive()
        while message.type is aiohttp.WSMsgType.TEXT:
            self._received.put_nowait(message.data)
            message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            reason = "sent a message that is no text"
        elif message.type is aiohttp.WSMsgType.ERROR:
            reason = f"broke the connection off ({message.data})"
        else:
            reason = f"closed the connection (code {socket.close_code})"
        self._received.put_nowait(SessionFailed(reason))


def _failure(data: Mapping[str, Any]) -> Exception:
    """Return the error for a message of the type `error`."""
    code, message = data.get("code"), " ".join(str(data.get("message")).split())[:LONGEST_REASON]
    if code == "CAPACITY_REACHED":
        return NotNow(f"has no session to spare: {message} (raise its max_concurrent_envs)")
    if code == "VALIDATION_ERROR":
        return Refused(_faults(data.get("errors")) or message)
    return SessionFailed(f"answered with {code}: {message}")


def _faults(errors: object) -> str:
    """Return pydantic's errors in one line."""
    if not isinstance(errors, list):
        return ""
    found = [error for error in errors if isinstance(error, dict)]
    lines = [f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in found]
    return "; ".join(lines)[:LONGEST_REASON]
