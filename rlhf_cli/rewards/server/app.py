"""HTTP application for `rlhf serve-rm`: authentication, limits and responses.

The wire format is in rewards/remote/call.py. Errors are a status and `{"detail": SENTENCE}`.
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

from rlhf_cli.config.serve import TEXTS_TOGETHER, ServeConfig
from rlhf_cli.data.pictures.decoding import PictureFault
from rlhf_cli.data.pictures.placing import picture_of_contents
from rlhf_cli.data.pictures.sources import encoded_base64
from rlhf_cli.errors import RunError
from rlhf_cli.models.vision.pictures import Picture
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.remote.call import SERVICE
from rlhf_cli.rewards.server.batching import Abandoned, Batcher, QueueFull, ScoreJobs
from rlhf_cli.rewards.server.connections import BoundedConnection

logger = logging.getLogger(__name__)

REWARD_PATH = "/get_reward"
_RETRY_SECONDS = 1
_BODY_SECONDS = 30
"""Time limit in seconds for sending a request body."""
_MAX_CONNECTIONS = 1024
_GRACE_SECONDS = 30
"""Seconds that open requests get to finish on shutdown."""


class _RequestBody(BaseModel):
    """Request body. Entries in `images` are encoded images, or indices into `distinct_images`."""

    # Without strict, pydantic accepts `true` and 1.0 as an image index.
    model_config = ConfigDict(strict=True)

    query: Annotated[list[str], Field(min_length=1)]
    prompts: list[str] | None = None
    labels: list[str | None] | None = None
    images: list[list[str | int]] | None = None
    distinct_images: list[str] = []


def reward_app(score: ScoreJobs, config: ServeConfig, *, key: str, takes_images: bool = False) -> FastAPI:
    """Build the application: `POST /get_reward` requires the key, `GET /health` does not."""
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
            raise HTTPException(401, "the header `Authorization: Bearer KEY` with this server's key is missing")
        body = _parsed(await _body(request, config), config, takes_images=takes_images)
        pictures = await _pictures(body)
        return _answer(await _scores(batcher, _score_requests(body, pictures), request))

    return app


def _shows(request: Request, key: str) -> bool:
    """Return whether a request carries the key."""
    shown = request.headers.get("Authorization", "")
    # Constant-time comparison: response times must not reveal the key.
    return hmac.compare_digest(shown.encode(), f"Bearer {key}".encode())


async def _body(request: Request, config: ServeConfig) -> bytes:
    limit = int(config.max_body_mb * 1e6)
    too_large = HTTPException(413, f"the request is larger than {config.max_body_mb:g} MB (--max_body_mb)")
    # Reject early by the declared size. The header may be missing or wrong, so the loop counts bytes too.
    if int(request.headers.get("Content-Length", 0)) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the request was not complete within {_BODY_SECONDS} s") from None
    return bytes(body)


def _parsed(content: bytes, config: ServeConfig, *, takes_images: bool) -> _RequestBody:
    """Parse and validate a request body. Raises HTTPException if it is invalid or exceeds a limit."""
    try:
        body = _RequestBody.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HTTPException(422, f"{where + ': ' if where else ''}{first['msg']}") from None
    count = len(body.query)
    if count > config.max_texts:
        raise HTTPException(413, f"query has {count} texts, more than {config.max_texts} (--max_texts)")
    for name in ("prompts", "labels", "images"):
        column = getattr(body, name)
        if column is not None and len(column) != count:
            raise HTTPException(422, f"{name} has {len(column)} entries, but query has {count} texts")
    for number, text in enumerate(body.query):
        if len(text) > config.max_chars:
            detail = f"query text {number} has {len(text):,} characters, more than {config.max_chars:,} (--max_chars)"
            raise HTTPException(422, detail)
    _check_images(body.images or [], config, takes_images=takes_images)
    return body


def _check_images(images: Sequence[Sequence[str | int]], config: ServeConfig, *, takes_images: bool) -> None:
    for number, row in enumerate(images):
        if row and not takes_images:
            raise HTTPException(422, "images: this server's rewards do not support images")
        if len(row) > config.max_images:
            raise HTTPException(
                422, f"query text {number} has {len(row)} images, more than {config.max_images} (--max_images)"
            )


async def _pictures(body: _RequestBody) -> list[tuple[Picture, ...]]:
    """Decode the images for each text. Raises HTTPException if one is invalid."""
    if body.images is None:
        return [()] * len(body.query)
    try:
        # Decoding large images would block the event loop, health checks included.
        rows = [_resolved(row, body.distinct_images) for row in body.images]
        return await asyncio.to_thread(_received_pictures, rows)
    except PictureFault as fault:
        raise HTTPException(422, str(fault)) from None


def _resolved(images: Sequence[str | int], pictures: Sequence[str]) -> list[str]:
    """Replace indices by the images they refer to."""
    if wrong := [one for one in images if isinstance(one, int) and not 0 <= one < len(pictures)]:
        raise HTTPException(422, f"images refers to image {wrong[0]}, but pictures has {len(pictures)} entries")
    return [pictures[one] if isinstance(one, int) else one for one in images]


def _score_requests(body: _RequestBody, pictures: Sequence[tuple[Picture, ...]]) -> list[ScoreRequest]:
    """Convert a request body into responses to score."""
    count = len(body.query)
    prompts = [""] * count if body.prompts is None else body.prompts
    labels = [None] * count if body.labels is None else body.labels
    # One group per request: group rewards may compare these texts.
    group = uuid4().hex
    return [
        ScoreRequest(
            query,
            prompt,
            query.removeprefix(prompt),
            label,
            # Not in the wire format. No served reward depends on token counts or truncation.
            num_tokens=0,
            truncated=False,
            group=group,
            sample=number,
            group_size=count,
            pictures=images,
        )
        for number, (query, prompt, label, images) in enumerate(zip(body.query, prompts, labels, pictures, strict=True))
    ]


async def _scores(batcher: Batcher, requests: list[ScoreRequest], request: Request) -> list[Score]:
    try:
        return await batcher.ask(requests, is_abandoned=request.is_disconnected)
    except QueueFull:
        detail = f"queue full: {batcher.num_waiting} texts are waiting, no room for {len(requests)} more (--max_queue)"
        raise HTTPException(503, detail, headers={"Retry-After": str(_RETRY_SECONDS)}) from None
    # nginx's status for a closed request. Only the log shows it: the client has disconnected.
    except Abandoned:
        raise HTTPException(499, "the client has disconnected") from None
    except RunError as error:
        raise HTTPException(500, str(error)) from None
    except Exception as error:
        logger.exception("a request could not be scored")
        raise HTTPException(500, f"unexpected {type(error).__name__}: {str(error)[:200]}") from None


def _answer(scores: list[Score]) -> dict[str, Any]:
    """Build the response body. Failed rewards are null, with the reason in `details`."""
    details = ["" if score.value is not None else score.detail.partition("\n")[0] for score in scores]
    return {"rewards": [score.value for score in scores], "details": details}


class StoppableServer(uvicorn.Server):
    """A uvicorn server without signal handlers. When `stop()` returns True, it finishes open requests and exits."""

    def __init__(
        self,
        app: FastAPI,
        stop: Callable[[], bool],
        connection: type[BoundedConnection] = BoundedConnection,
        *,
        max_connections: int = _MAX_CONNECTIONS,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=max_connections,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._stop = stop

    async def serve(self, sockets: Any = None) -> None:
        """Serve requests until `stop()` returns True."""
        # uvicorn's `serve` installs signal handlers around `_serve`; the command has its own.
        await self._serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down. uvicorn calls this ten times per second."""
        return await super().on_tick(counter) or self._stop()


def _received_pictures(images: Sequence[Sequence[str]]) -> list[tuple[Picture, ...]]:
    """Decode the images for each text from `data:` URLs or base64, at original size. Equal ones are decoded once.

    Paths and other URLs are rejected: they would read files on the server or reach into its network.

    Raises:
        PictureFault: an image is invalid. The message names the text, counted from 0, and the image, counted from 1.
    """
    decoded: dict[str, Picture] = {}
    for number, row in enumerate(images):
        for place, url in enumerate(row, 1):
            if url not in decoded:
                decoded[url] = _received(url, f"image {place} for query text {number}")
    return [tuple(decoded[url] for url in row) for row in images]


def _received(url: str, where: str) -> Picture:
    try:
        return picture_of_contents(encoded_base64(url))
    except PictureFault as fault:
        raise PictureFault(f"{where} {fault}") from fault
