"""A server with the protocol of openenv 0.10.0 (http_server.py, types.py), in a thread of the test."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import WSMsgType, web

from rlhf_cli.event_loop import LoopThread

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Stepped = tuple[dict[str, Any], float | None, bool]
"""Observation, reward, done."""

TEXT_ACTION = {
    "additionalProperties": False,
    "properties": {
        "metadata": {"additionalProperties": True, "title": "Metadata", "type": "object"},
        "message": {"title": "Message", "type": "string"},
    },
    "required": ["message"],
    "title": "GuessAction",
    "type": "object",
}
TOOL_ACTION = {
    "properties": {
        "metadata": {"type": "object"},
        "type": {"const": "call_tool", "default": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
    "title": "CallToolAction",
    "type": "object",
}


class InvalidAction(Exception):
    """pydantic would reject the action."""


class RawAnswer(Exception):
    """Sends this text instead of a reply."""


class Dead(Exception):
    """Closes the connection."""


class Environment:
    """One session. Methods may raise the exceptions above, or any other."""

    async def reset(self, *arguments: Any, **columns: Any) -> Stepped:
        raise NotImplementedError

    async def step(self, action: dict[str, Any]) -> Stepped:
        raise NotImplementedError


class OpenEnvLike:
    """A running server, as a context manager."""

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        action: dict[str, Any] | None = TEXT_ACTION,
        max_sessions: int = 64,
        port: int = 0,
        key: str | None = None,
    ) -> None:
        self._make, self._action, self._max_sessions, self.port = make, action, max_sessions, port
        self._key = key
        self.num_sessions = self.most_sessions = 0
        self.num_pongs = 0
        self._sockets: dict[web.WebSocketResponse, asyncio.Task[Any] | None] = {}  # with their serving tasks

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread = LoopThread("OpenEnv")
        self.run(self._start())
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Close all connections and stop."""
        self._thread.end(self._stop)

    def run(self, work: Awaitable[Any]) -> Any:
        """Run a coroutine in the server's event loop, and return its result."""
        return self._thread.run(asyncio.wait_for(work, 30))

    def ping(self) -> None:
        """Send a ping in all sessions."""

        async def ping_all() -> None:
            for socket in self._sockets:
                await socket.ping()

        self.run(ping_all())

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/ws", self._serve)
        if self._action is not None:
            app.router.add_get("/schema", self._schema)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        for socket, task in [*self._sockets.items()]:
            _cut(socket)
            if task is not None:
                task.cancel()  # it may hang
        await self._runner.cleanup()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.Response(status=401)
        return await handler(request)

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self._action, "observation": {}, "state": {}})

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        if self.num_sessions >= self._max_sessions:
            message = f"Server at capacity: {self.num_sessions}/{self._max_sessions} sessions active"
            await socket.send_json({"type": "error", "data": {"message": message, "code": "CAPACITY_REACHED"}})
            return socket
        self.num_sessions += 1
        self.most_sessions = max(self.most_sessions, self.num_sessions)
        self._sockets[socket] = asyncio.current_task()
        try:
            with contextlib.suppress(Dead, ConnectionError):
                await self._session(socket)
        finally:
            del self._sockets[socket]
            self.num_sessions -= 1
        return socket

    async def _session(self, socket: web.WebSocketResponse) -> None:
        environment = self._make()
        async for message in socket:
            if message.type is WSMsgType.PONG:
                self.num_pongs += 1
            elif message.type is WSMsgType.TEXT:
                asked = json.loads(message.data)
                try:
                    await socket.send_str(await _answer(environment, asked["type"], asked.get("data", {})))
                except Dead:
                    _cut(socket)
                    raise


def _cut(socket: web.WebSocketResponse) -> None:
    transport = socket._req.transport if socket._req is not None else None
    if transport is not None:
        transport.abort()


async def _answer(environment: Environment, kind: str, data: dict[str, Any]) -> str:
    if kind == "state":
        return json.dumps({"type": "state", "data": {"episode_id": None, "step_count": 0}})
    try:
        stepped = environment.reset(**data) if kind == "reset" else environment.step(data)
        observation, reward, done = await stepped
    except Dead:
        raise
    except RawAnswer as raw:
        return str(raw)
    except InvalidAction as error:
        errors = [{"loc": ["message"], "msg": str(error), "type": "value_error"}]
        found = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
        return json.dumps({"type": "error", "data": found})
    except Exception as error:
        return json.dumps({"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}})
    return json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})
