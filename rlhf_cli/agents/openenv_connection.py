"""A WebSocket connection to an OpenEnv server: requests, responses and failure types."""

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

_MAX_MESSAGE_BYTES = 4 << 20
"""Maximum message size. It protects the driver's memory from a broken server."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds between attempts to open a session; doubled after each attempt."""
# For the server to confirm the end of a connection.
_CLOSE_SECONDS = 2.0

# Quoted characters of invalid messages.
_QUOTED = 200


class NotNow(Exception):
    """The server has no free session now but may have one later. The message completes a sentence about it."""


class Refused(SessionFailed):
    """The server rejected an action; the session continues. The message holds only the reason."""


class Connection:
    """A connection, which equals one session."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def begin(self, kind: str, data: Mapping[str, Any] | None, *, seconds: float) -> dict[str, Any]:
        """Connect and send a request, with retries for `seconds` while the server is full or restarting.

        Raises:
            NotNow: the server had no session until the deadline.
            SessionFailed: the response is an error or invalid.
        """
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            try:
                await self.open()
                return await self.ask(kind, data)
            except NotNow:
                # A full server refuses on an open connection, so close it before the next attempt.
                await self.close()
                if time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def open(self) -> None:
        """Connect. Raises NotNow if the server is unreachable, SessionFailed if it does not accept WebSockets."""
        self._received: asyncio.Queue[str | SessionFailed] = asyncio.Queue()
        # aiohttp's defaults are 4 MiB and 10 s. Waiting 10 s per unresponsive server would delay the end of a run.
        try:
            self._socket = await self._http.ws_connect(
                self._url, max_msg_size=_MAX_MESSAGE_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS)
            )
        except aiohttp.WSServerHandshakeError as error:
            advice = f": {KEY_ADVICE}" if error.status in NEEDS_KEY else ""
            reason = f"answered with status {error.status} at /ws{advice}"
            raise (NotNow if error.status in BUSY | NO_SERVER_BEHIND else SessionFailed)(reason) from None
        except aiohttp.ClientError as error:
            raise NotNow(str(connection_failure(error))) from None
        self._reader = asyncio.create_task(self._read(self._socket))

    async def ask(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a request and return the `data` in the response.

        Raises NotNow, Refused or SessionFailed.
        """
        assert self._socket is not None
        # If the connection is gone, `_read` has queued the reason, which the next line receives.
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
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
        raise SessionFailed(f"sent a message that is not an observation: {received[:_QUOTED]}")

    async def close(self) -> None:
        """Close the connection, if open."""
        if self._socket is not None:
            await self._socket.close()
            self._reader.cancel()
            self._socket = None

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Receive messages until the connection closes, then queue the reason."""
        # aiohttp replies to pings only inside receive(). Without a pending receive() between turns, the server would
        # drop the connection as dead.
        message = await socket.receive()
        while message.type is aiohttp.WSMsgType.TEXT:
            self._received.put_nowait(message.data)
            message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            reason = "sent a binary message"
        elif message.type is aiohttp.WSMsgType.ERROR:
            reason = f"dropped the connection ({message.data})"
        else:
            reason = f"closed the connection (code {socket.close_code})"
        self._received.put_nowait(SessionFailed(reason))


def _failure(data: Mapping[str, Any]) -> Exception:
    """Convert an `error` message to an exception."""
    code, message = data.get("code"), " ".join(str(data.get("message")).split())[:LONGEST_REASON]
    if code == "CAPACITY_REACHED":
        return NotNow(f"has no free session: {message} (raise its max_concurrent_envs)")
    if code == "VALIDATION_ERROR":
        return Refused(_faults(data.get("errors")) or message)
    return SessionFailed(f"answered with {code}: {message}")


def _faults(errors: object) -> str:
    """Format pydantic validation errors in one line."""
    if not isinstance(errors, list):
        return ""
    found = [error for error in errors if isinstance(error, dict)]
    lines = [f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in found]
    return "; ".join(lines)[:LONGEST_REASON]
