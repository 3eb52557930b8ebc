"""The HTTP server that agent programs speak to: chat completions in OpenAI's form, on the loopback interface alone.

A program is known by the key of its episode. Requests go to the owner of the server (agent_programs.py).
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

HOST = "127.0.0.1"
_MOST_BYTES = 64 << 20  # of a request's body
_RETRIES = "x-stainless-retry-count"  # a header of OpenAI's clients
_USE = "use chat completions, POST /v1/chat/completions"
_CLOSE_SECONDS = 1.0  # for answers on their way when the server ends


@dataclass(eq=False)
class Caller:
    """A program that may ask, by its key."""

    episode: int
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(32)}")


Answer = Callable[[Caller, ChatRequest], Awaitable[Completion]]
"""Returns the answer to a program's request, or raises Refused."""


class Endpoint:
    """Serves programs while they are admitted; for one event loop."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._callers: set[Caller] = set()
        self._count = itertools.count()

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[_with_errors])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_SECONDS)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """End the server and all connections."""
        await self._runner.cleanup()

    def admit(self, caller: Caller) -> None:
        """Answer requests with its key from now on."""
        self._callers.add(caller)

    def dismiss(self, caller: Caller) -> None:
        """Refuse its key from now on."""
        self._callers.discard(caller)

    def _caller_of(self, request: web.Request) -> Caller:
        """Return the program with the request's key, in a time that does not depend on it. Raise Refused."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        found = [caller for caller in self._callers if hmac.compare_digest(caller.key.encode(), given)]
        if not found:
            raise Refused(
                "the key is of no running episode: it has ended, or OPENAI_API_KEY is not used",
                status=401,
                code="invalid_api_key",
            )
        return found[0]

    async def _models(self, request: web.Request) -> web.Response:
        self._caller_of(request)
        return web.json_response(model_list())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        caller, body = self._caller_of(request), await _body(request)
        asked = chat_request(body, is_first_try=request.headers.get(_RETRIES) == "0")
        form = Form.of(body, number=next(self._count), created=int(time.time()))
        completion = await self._answer(caller, asked)
        if not body.get("stream"):
            return web.json_response(form.whole(completion))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with contextlib.suppress(ConnectionError):  # the program has ended, or does not wait for the answer
            await response.prepare(request)
            for chunk in form.chunks(completion):
                await response.write(chunk.encode())
        return response


async def _body(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError):
        raise Refused("the body is no JSON") from None


@web.middleware
async def _with_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer with OpenAI's form of an error."""
    try:
        return await handler(request)
    except Refused as refused:
        found = refused
    except web.HTTPNotFound:
        found = Refused(f"{request.method} {request.path} is unknown: {_USE}", status=404)
    except web.HTTPException as error:
        found = Refused(f"{request.method} {request.path}: {error.reason}", status=error.status)
    return web.json_response(error_body(found), status=found.status)
