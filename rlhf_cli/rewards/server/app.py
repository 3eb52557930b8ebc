"""The HTTP side of `rlhf serve-rm`: authentication, limits and answers.

Wire format: rewards/remote/call.py. Every refusal is a status and `{"detail": one sentence}`. Leaves out what scores.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_cli.config.serve import ServeConfig
from rlhf_cli.data.pictures.decoding import PictureFault
from rlhf_cli.errors import RunError
from rlhf_cli.models.vision.pictures import Picture
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.remote.call import SERVICE
from rlhf_cli.rewards.server.batching import Abandoned, Batcher, QueueFull, ScoreJobs
from rlhf_cli.rewards.server.connections import BoundedConnection
from rlhf_cli.rewards.server.pictures import received_pictures

logger = logging.getLogger(__name__)

REWARD_PATH = "/get_reward"
RETRY_SECONDS = 1
BODY_SECONDS = 30
"""Seconds a client may take to send its request."""
MAX_CONNECTIONS = 1024
GRACE_SECONDS = 30
"""Seconds in which requests that are being answered may finish when the server is stopped."""
TEXTS_TOGETHER = 256
"""Texts of several requests that are scored in one go at most."""


class _RequestBody(BaseModel):
    """The body of a request. A picture in `images` is the picture itself, or its number in `pictures`."""

    model_config = ConfigDict(strict=True)

    query: Annotated[list[str], Field(min_length=1)]
    prompts: list[str] | None = None
    labels: list[str | None] | None = None
    images: list[list[str | int]] | None = None
    pictures: list[str] = []


def reward_app(score: ScoreJobs, config: ServeConfig, *, key: str, takes_images: bool = False) -> FastAPI:
    """Return the application: `POST /get_reward` for clients with the key, `GET /health` for everybody."""
    batcher = Batcher(score, max_waiting=config.max_queue, max_together=TEXTS_TOGETHER)

    @asynccontextmanager
    async def scoring(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(lifespan=scoring, openapi_url=None)

    @app.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        counts = {"waiting": batcher.num_waiting, "scored": batcher.num_scored}
        state = {"service": SERVICE, "status": "ready", "authorised": _shows(request, key), "images": takes_images}
        return state | counts

    @app.post(REWARD_PATH)
    async def get_reward(request: Request) -> dict[str, Any]:
        if not _shows(request, key):
            raise HTTPException(401, "the header `Authorization: Bearer KEY` with the key of this server is missing")
        asked = _asked(await _body(request, config), config, takes_images=takes_images)
        pictures = await _pictures(asked)
        return _answer(await _scores(batcher, _score_requests(asked, pictures), request))

    return app


def _shows(request: Request, key: str) -> bool:
    """Return whether a request has the key, found out in a time that does not depend on the key."""
    shown = request.headers.get("Authorization", "")
    return hmac.compare_digest(shown.encode(), f"Bearer {key}".encode())


async def _body(request: Request, config: ServeConfig) -> bytes:
    limit = int(config.max_body_mb * 1e6)
    too_large = HTTPException(413, f"the request has more than {config.max_body_mb:g} MB (--max_body_mb)")
    if int(request.headers.get("Content-Length", 0)) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the request was not complete within {BODY_SECONDS} s") from None
    return bytes(body)


def _asked(body: bytes, config: ServeConfig, *, takes_images: bool) -> _RequestBody:
    """Return the body of a request. Raise HTTPException for one that is not as it should be."""
    try:
        asked = _RequestBody.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HTTPException(422, f"{where + ': ' if where else ''}{first['msg']}") from None
    count = len(asked.query)
    if count > config.max_texts:
        raise HTTPException(413, f"{count} texts are more than {config.max_texts} (--max_texts)")
    for name in ("prompts", "labels", "images"):
        column = getattr(asked, name)
        if column is not None and len(column) != count:
            raise HTTPException(422, f"{name} has {len(column)} entries for {count} texts of query")
    for number, text in enumerate(asked.query):
        if len(text) > config.max_chars:
            detail = (
                f"text {number} of query has {len(text):,} characters, more than {config.max_chars:,} (--max_chars)"
            )
            raise HTTPException(422, detail)
    _check_images(asked.images or [], config, takes_images=takes_images)
    return asked


def _check_images(images: Sequence[Sequence[str | int]], config: ServeConfig, *, takes_images: bool) -> None:
    for number, its in enumerate(images):
        if its and not takes_images:
            raise HTTPException(422, "images: the rewards of this server read texts alone")
        if len(its) > config.max_images:
            raise HTTPException(
                422, f"text {number} of query has {len(its)} pictures, more than {config.max_images} (--max_images)"
            )


async def _pictures(asked: _RequestBody) -> list[tuple[Picture, ...]]:
    """Return the pictures of each text. Raise HTTPException for one that cannot be read."""
    if asked.images is None:
        return [()] * len(asked.query)
    try:
        return await asyncio.to_thread(received_pictures, [_found(its, asked.pictures) for its in asked.images])
    except PictureFault as fault:
        raise HTTPException(422, str(fault)) from None


def _found(images: Sequence[str | int], pictures: Sequence[str]) -> list[str]:
    """Return the pictures of a text, numbers replaced by what they name."""
    if wrong := [one for one in images if isinstance(one, int) and not 0 <= one < len(pictures)]:
        raise HTTPException(422, f"images names picture {wrong[0]}, and pictures has {len(pictures)}")
    return [pictures[one] if isinstance(one, int) else one for one in images]


def _score_requests(asked: _RequestBody, pictures: Sequence[tuple[Picture, ...]]) -> list[ScoreRequest]:
    """Return the responses to score."""
    count = len(asked.query)
    prompts = [""] * count if asked.prompts is None else asked.prompts
    labels = [None] * count if asked.labels is None else asked.labels
    group = uuid4().hex  # the texts of one request may be compared
    return [
        ScoreRequest(
            query,
            prompt,
            query.removeprefix(prompt),
            label,
            num_tokens=0,  # the wire format has no tokens and cuts; no reward that is served goes by them
            truncated=False,
            group=group,
            sample=number,
            group_size=count,
            pictures=its,
        )
        for number, (query, prompt, label, its) in enumerate(zip(asked.query, prompts, labels, pictures, strict=True))
    ]


async def _scores(batcher: Batcher, requests: list[ScoreRequest], request: Request) -> list[Score]:
    try:
        return await batcher.ask(requests, is_abandoned=request.is_disconnected)
    except QueueFull:
        detail = f"{batcher.num_waiting} texts are waiting and there is no room for {len(requests)} more (--max_queue)"
        raise HTTPException(503, detail, headers={"Retry-After": str(RETRY_SECONDS)}) from None
    except Abandoned:
        raise HTTPException(499, "the client is gone") from None
    except RunError as error:
        raise HTTPException(500, str(error)) from None
    except Exception as error:
        logger.exception("a request could not be scored")
        raise HTTPException(500, f"unexpected {type(error).__name__}: {str(error)[:200]}") from None


def _answer(scores: list[Score]) -> dict[str, Any]:
    """Return the body of an answer: a failed reward is null, and its detail is the reason."""
    details = ["" if score.value is not None else score.detail.partition("\n")[0] for score in scores]
    return {"rewards": [score.value for score in scores], "details": details}


class StoppableServer(uvicorn.Server):
    """A uvicorn server that leaves signals to this program: it answers open requests and ends after `stop()`."""

    def __init__(
        self,
        app: FastAPI,
        stop: Callable[[], bool],
        connection: type[BoundedConnection] = BoundedConnection,
        *,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=max_connections,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self._stop = stop

    async def serve(self, sockets: Any = None) -> None:
        """Answer on the sockets until `stop()`."""
        await self._serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; asked ten times a second."""
        return await super().on_tick(counter) or self._stop()
