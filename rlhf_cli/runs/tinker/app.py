"""HTTP application for `rlhf serve-tinker`: routes, authentication and limits of the Tinker API.

Requests that take long return a request ID at once, and clients retrieve the result with it. Errors are a status and
`{"detail": SENTENCE}`, or for results `{"error": SENTENCE, "category": "user" or "server"}`.
"""

import asyncio
import hmac
from typing import TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from rlhf_cli.errors import UsageError
from rlhf_cli.runs.tinker.checkpoints import CheckpointPath
from rlhf_cli.runs.tinker.futures import failed
from rlhf_cli.runs.tinker.requests import (
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    LoadWeights,
    OfModel,
    OfSession,
    OptimStep,
    RetrieveFuture,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
    WeightsInfo,
)
from rlhf_cli.runs.tinker.service import Service
from rlhf_cli.runs.tinker.wire import PROTOBUF, read_forward_backward

_PREFIX = "/api/v1"
_POLL_SECONDS = 20.0
"""Time for which a client's question for a result waits. Clients give up after 45 seconds."""
_BODY_SECONDS = 60
"""Time limit in seconds for sending a request body."""
_SAMPLES_AT_ONCE = 512
"""Sampling requests in flight per client: each has a connection that waits for its result."""
_WARNING = "rlhf serve-tinker: adapters do not include the unembedding, so train_unembed=True has no effect"
"""Clients show warnings without any logging set up. The unembedding is trained by default in Tinker."""
_NOTE = "rlhf serve-tinker: checkpoints do not expire (ttl_seconds)"

_Body = TypeVar("_Body", bound=BaseModel)


def tinker_app(service: Service, *, key: str, max_body_mb: float) -> FastAPI:
    """Build the application. All routes except `healthz` require the key."""

    def require_key(request: Request) -> None:
        shown = request.headers.get("X-API-Key", "")
        # Constant-time comparison: response times must not reveal the key.
        if not hmac.compare_digest(shown.encode(), key.encode()):
            raise HTTPException(401, "the header X-API-Key with this server's key is missing: set TINKER_API_KEY")

    app = FastAPI(openapi_url=None)
    app.state.service, app.state.max_body_mb = service, max_body_mb
    open_routes = APIRouter(prefix=_PREFIX)
    open_routes.get("/healthz")(_health)
    app.include_router(open_routes)
    for routes in (_OF_CLIENTS, _OF_TRAINING, _OF_CHECKPOINTS, _OTHERS):
        app.include_router(routes, prefix=_PREFIX, dependencies=[Depends(require_key)])

    @app.exception_handler(UsageError)
    async def refuse(_: Request, error: UsageError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    return app


async def _health() -> dict[str, str]:
    return {"status": "ok"}


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _bytes(request: Request) -> bytes:
    """Read the body. Raises HTTPException if it is too large or too slow."""
    max_mb: float = request.app.state.max_body_mb
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > max_mb * 1e6:
                    raise HTTPException(413, f"the request is larger than {max_mb:g} MB (--max_body_mb)")
    except TimeoutError:
        raise HTTPException(400, f"the request was not complete within {_BODY_SECONDS} s") from None
    return bytes(body)


async def _read(request: Request, kind: type[_Body]) -> _Body:
    """Read a JSON body. Raises HTTPException that names the first wrong field."""
    try:
        return kind.model_validate_json(await _bytes(request))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        note = " (this server does not support it)" if first["type"] in ("extra_forbidden", "literal_error") else ""
        said = first["msg"].removeprefix("Value error, ")
        raise HTTPException(422, f"{where + ': ' if where else ''}{said}{note}") from None


def _queued(request_id: str, model_id: str | None = None, **others: object) -> dict[str, object]:
    return {"request_id": request_id, "model_id": model_id, **others}


_OF_CLIENTS = APIRouter()
"""Clients, their sessions, and results."""


@_OF_CLIENTS.post("/client/config")
async def _client_config() -> dict[str, object]:
    # Only plain keys, and a result per request: everything else keeps the client's default.
    return {
        "pjwt_auth_enabled": False,
        "proto_compress_fwdbwd": False,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        # Samples take minutes on a CPU, without progress that the client could see.
        "sample_enable_stuck_detection": False,
        "sample_max_concurrent_requests": _SAMPLES_AT_ONCE,
        "use_pyqwest_transport": False,
    }


@_OF_CLIENTS.post("/client/dynamic_config")
async def _dynamic_config() -> dict[str, object]:
    return {"sample_cancel_enabled": False}


@_OF_CLIENTS.post("/telemetry")
async def _telemetry() -> dict[str, str]:
    """Accept the client's events, and drop them."""
    return {"status": "accepted"}


@_OF_CLIENTS.get("/get_server_capabilities")
async def _capabilities(request: Request) -> dict[str, object]:
    served = _service(request).served
    model = {"model_name": served.name, "max_context_length": served.max_len, "trainable": True, "sampleable": True}
    return {"supported_models": [model]}


@_OF_CLIENTS.post("/create_session")
async def _create_session(request: Request) -> dict[str, object]:
    await _read(request, CreateSession)
    session_id = _service(request).create_session()
    return {"type": "create_session", "session_id": session_id, "warning_message": _WARNING, "info_message": _NOTE}


@_OF_CLIENTS.post("/session_heartbeat")
async def _heartbeat(request: Request) -> dict[str, str]:
    body = await _read(request, OfSession)
    _service(request).session(body.session_id)
    return {"type": "session_heartbeat"}


@_OF_CLIENTS.post("/sessions/{session_id}/finish")
async def _finish(request: Request, session_id: str) -> Response:
    _service(request).finish_session(session_id)
    return Response(status_code=204)


@_OF_CLIENTS.post("/retrieve_future")
async def _retrieve(request: Request) -> Response:
    body = await _read(request, RetrieveFuture)
    try:
        result = await _service(request).futures.result(body.request_id, seconds=_POLL_SECONDS)
    except KeyError:
        unknown = f"request {body.request_id} is unknown: the server has restarted, or the result was retrieved before"
        result = failed(unknown, "server")
    if result is None:
        # The client asks again at once.
        return JSONResponse({"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408)
    if isinstance(result.content, bytes):
        return Response(result.content, media_type=PROTOBUF)
    return JSONResponse(result.content)


_OF_TRAINING = APIRouter()
"""Models in training, and sampling."""


@_OF_TRAINING.post("/create_model")
async def _create_model(request: Request) -> dict[str, object]:
    body = await _read(request, CreateModel)
    model_id = _service(request).create_model(body)
    return _queued(model_id, model_id)


@_OF_TRAINING.post("/get_info")
async def _get_info(request: Request) -> dict[str, object]:
    body = await _read(request, OfModel)
    return _service(request).describe_model(body.model_id)


@_OF_TRAINING.post("/forward_backward")
async def _forward_backward(request: Request) -> dict[str, object]:
    body = read_forward_backward(await _bytes(request))
    return _queued(_service(request).forward_backward(body), body.model_id)


@_OF_TRAINING.post("/optim_step")
async def _optim_step(request: Request) -> dict[str, object]:
    body = await _read(request, OptimStep)
    return _queued(_service(request).optim_step(body), body.model_id)


@_OF_TRAINING.post("/create_sampling_session")
async def _create_sampling_session(request: Request) -> dict[str, object]:
    body = await _read(request, CreateSamplingSession)
    session_id = _service(request).create_sampling_session(body)
    return {"type": "create_sampling_session", "sampling_session_id": session_id}


@_OF_TRAINING.get("/samplers/{session_id}")
async def _sampler(request: Request, session_id: str) -> dict[str, object]:
    service = _service(request)
    path = service.sampled_path(session_id)
    return {
        "sampler_id": session_id,
        "base_model": service.served.name,
        "model_path": None if path is None else str(path),
    }


@_OF_TRAINING.post("/asample")
async def _sample(request: Request) -> dict[str, object]:
    body = await _read(request, Sample)
    request_id, sequence_ids = _service(request).sample(body)
    return _queued(request_id, sample_sequence_ids=sequence_ids)


_OF_CHECKPOINTS = APIRouter()
"""Checkpoints, and the training runs that they belong to."""


@_OF_CHECKPOINTS.post("/save_weights")
async def _save(request: Request) -> dict[str, object]:
    body = await _read(request, SaveWeights)
    return _queued(_service(request).save_weights(body), body.model_id)


@_OF_CHECKPOINTS.post("/save_weights_for_sampler")
async def _save_for_sampler(request: Request) -> dict[str, object]:
    body = await _read(request, SaveWeightsForSampler)
    return _queued(_service(request).save_for_sampler(body), body.model_id)


@_OF_CHECKPOINTS.post("/load_weights")
async def _load(request: Request) -> dict[str, object]:
    body = await _read(request, LoadWeights)
    return _queued(*_service(request).load_weights(body))


@_OF_CHECKPOINTS.post("/weights_info")
async def _weights_info(request: Request) -> dict[str, object]:
    body = await _read(request, WeightsInfo)
    service = _service(request)
    shape = service.checkpoints.facts(CheckpointPath.parse(body.tinker_path)).shape
    layers = {"train_unembed": False, "train_mlp": shape.train_mlp, "train_attn": shape.train_attn}
    return {"base_model": service.served.name, "is_lora": True, "lora_rank": shape.rank, **layers}


@_OF_CHECKPOINTS.get("/training_runs/{model_id}")
async def _training_run(request: Request, model_id: str) -> dict[str, object]:
    return _service(request).describe_run(model_id)


@_OF_CHECKPOINTS.get("/training_runs/{model_id}/checkpoints")
async def _checkpoints(request: Request, model_id: str) -> dict[str, object]:
    return {"checkpoints": _service(request).checkpoints.listed(model_id)}


@_OF_CHECKPOINTS.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}")
async def _delete(request: Request, model_id: str, kind: str, name: str) -> Response:
    _service(request).checkpoints.delete(CheckpointPath.parse(f"tinker://{model_id}/{kind}/{name}"))
    return Response(status_code=204)


_OTHERS = APIRouter()
"""Routes of the API that this server does not have."""


@_OTHERS.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
async def _absent(path: str) -> None:
    raise HTTPException(404, f"rlhf serve-tinker does not have {path} of the Tinker API")
