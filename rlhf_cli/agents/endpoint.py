"""OpenAI-compatible HTTP server for agents, on the loopback interface only.

Each episode has an API key that identifies the agent. Requests are passed to the owner (agent_programs.py).
"""

import contextlib
import hmac
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rlhf_cli.agents.chat_records import ChatRequest, Completion, Refused
from rlhf_cli.agents.chat_requests import chat_request
from rlhf_cli.agents.chat_responses import Form, error_body, model_list

_HOST = "127.0.0.1"
# aiohttp defaults to 1 MiB, less than a long conversation with tool results.
_MOST_BYTES = 64 << 20
# OpenAI clients count attempts in this header. A first attempt has "0" and is never a retry.
_RETRIES = "x-stainless-retry-count"
_USE = "use chat completions, POST /v1/chat/completions"
# Grace period for responses in flight at shutdown; the agents are gone by then.
_CLOSE_SECONDS = 1.0


def new_key() -> str:
    """Return an API key that nobody can guess."""
    return f"sk-{secrets.token_urlsafe(32)}"


@dataclass(eq=False)
class Caller:
    """An agent with access to the endpoint, identified by API key."""

    key: str = field(default_factory=new_key)


_Answer = Callable[[Caller, ChatRequest], Awaitable[Completion]]
"""Returns the completion for an agent's request, or raises Refused."""


class Endpoint:
    """Serves admitted agents. Use it in one event loop."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._callers: set[Caller] = set()
        self._count = itertools.count()

    async def start(self) -> None:
        """Listen on a free loopback port."""
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_with_errors])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_SECONDS)
        await self._runner.setup()
        site = web.TCPSite(self._runner, _HOST, 0)
        await site.start()
        self.url = f"http://{_HOST}:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """Stop the server and close all connections."""
        await self._runner.cleanup()

    def admit(self, caller: Caller) -> None:
        """Accept requests with this agent's key."""
        self._callers.add(caller)

    def dismiss(self, caller: Caller) -> None:
        """Reject requests with this agent's key."""
        self._callers.discard(caller)

    def _caller_of(self, request: web.Request) -> Caller:
        """Return the agent that owns the request's key. Raises Refused if there is none."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        # compare_digest over all callers takes the same time for any key, so timing reveals no key.
        found = [caller for caller in self._callers if hmac.compare_digest(caller.key.encode(), given)]
        if not found:
            raise Refused(
                "this API key belongs to no running episode: the episode has ended, or OPENAI_API_KEY is not used",
                status=401,
                code="invalid_api_key",
            )
        return found[0]

    async def _models(self, request: web.Request) -> web.Response:
        self._caller_of(request)
        return web.json_response(model_list())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        caller, body = self._caller_of(request), await _body(request)
        chat = chat_request(body, is_first_try=request.headers.get(_RETRIES) == "0")
        form = Form.of(body, number=next(self._count), created=int(time.time()))
        completion = await self._answer(caller, chat)
        if not body.get("stream"):
            return web.json_response(form.whole(completion))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        # The agent has exited or disconnected. The turn is recorded anyway.
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            for chunk in form.chunks(completion):
                await response.write(chunk.encode())
        return response


async def _body(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError):
        raise Refused("the request body is not valid JSON") from None


@web.middleware
async def _with_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert errors to OpenAI's error format."""
    try:
        return await handler(request)
    except Refused as refused:
        refusal = refused
    except web.HTTPNotFound:
        refusal = Refused(f"{request.method} {request.path} is not available: {_USE}", status=404)
    except web.HTTPException as error:
        refusal = Refused(f"{request.method} {request.path}: {error.reason}", status=error.status)
    return web.json_response(error_body(refusal), status=refusal.status)
