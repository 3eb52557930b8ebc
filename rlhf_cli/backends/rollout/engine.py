"""Shared parts of all rollout engines: protocol, settings, batches, EOS tokens, input checks and the death error."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf_cli.backends.cluster.placement import ENGINE
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.rollout import CPU_CACHE_GIB, EngineConfig, SyncBackend
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.vision.pictures import unexpanded


class EngineDead(RunError):
    """A process of a rollout engine has died. The engine is unusable and must be restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings for building a rollout engine, shared by all backends.

    - `role`: what the engine is for: rollouts or judging, which have settings of different names.
    - `max_model_len`: limit for prompt plus response in tokens.
    - `gpu_memory_utilization`: fraction of GPU memory for vLLM.
    - `num_threads`: CPU threads per worker; None uses all cores available to this process.
    - `kv_cache_gib`: KV cache size without a GPU. It is fixed instead of measured, so that batches have the same
      schedule, and the same rounding, in every process.
    - `max_num_seqs`: sequences per step on a CPU and with transformers. On a GPU, vLLM selects it for the card.
    - `vllm_args`: additional vLLM engine arguments, which override all others.
    - `max_lora_rank`: if set, pushes contain only the adapter. Use one of vLLM's allowed values.
    - `max_images_per_prompt`: image limit; 0 for vision-language models that read only text, None for text models.
    - `record_routed_experts`: record the experts of each token, for batches that ask for them.
    - `structured_outputs`: requests may have a JSON schema, for which vLLM loads the model's tokenizer.
    - `collect_seconds`: time from the first response until `collect` of the engine's host returns, so that the driver
      does not receive every response in a call. A complete batch is returned at once.
    - `decodes_for`: model whose tokenizer decodes responses in the engine's process; None to send only tokens.
    - `min_pixels`, `max_pixels`: the trainer's image size limits; None uses the limits from the model's processor.
    """

    max_model_len: int
    role: str = ENGINE
    dtype: str = "bf16"
    seed: int = 0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6
    # None means eager on a CPU and compiled on a GPU.
    enforce_eager: bool | None = None
    enable_prefix_caching: bool = True
    enable_sleep: bool = False
    sync_backend: SyncBackend = "shm"
    trust_remote_code: bool = False
    num_threads: int | None = None
    max_num_seqs: int = 256
    kv_cache_gib: int = CPU_CACHE_GIB
    vllm_args: Mapping[str, object] = field(default_factory=dict)
    max_lora_rank: int | None = None
    max_images_per_prompt: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    record_routed_experts: bool = False
    structured_outputs: bool = False
    collect_seconds: float = 0.0
    decodes_for: ModelSource | None = None


def engine_settings(
    engine: EngineConfig, model: ModelSource, pictures: PicturesConfig, *, max_model_len: int, seed: int, **others: Any
) -> EngineSettings:
    """Return the settings of the engines of a command; the machine sets memory and threads."""
    return EngineSettings(
        max_model_len=max_model_len,
        dtype=model.param_dtype,
        seed=seed,
        tensor_parallel_size=engine.vllm_tensor_parallel_size or 1,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.enable_prefix_caching,
        trust_remote_code=model.trust_remote_code,
        vllm_args=engine.engine_arguments,
        max_images_per_prompt=pictures.max_images_per_prompt,
        min_pixels=pictures.min_pixels,
        max_pixels=pictures.max_pixels,
        **others,
    )


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Responses completed since the last `collect`.

    `responses` are pairs (request index in the batch, response). If `is_last` is true, the batch is complete until
    requests are added.
    """

    responses: list[tuple[int, Generation]]
    is_last: bool


class RolloutEngine(Protocol):
    """A rollout engine in a separate process. It serves one batch at a time; weights change between batches.

    Constructor arguments are a model path and `EngineSettings`.
    """

    async def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Generate one response per request, in request order."""
        ...

    async def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch. Requests are numbered by list position."""

    async def add(self, requests: list[GenerationRequest]) -> None:
        """Add requests to the batch, even if it is complete. Numbering continues.

        Errors are raised by `collect`.
        """

    async def collect(self) -> Arrivals:
        """Return responses completed since the last call. Waits for one unless the batch is complete.

        Canceling a call loses no response: the next one returns them.
        """
        ...

    async def cut(self, max_tokens: int) -> None:
        """Cancel responses longer than `max_tokens`; 0 cancels the batch."""

    async def check_alive(self) -> None:
        """Raise EngineDead if the engine can no longer generate."""

    async def sleep(self, level: int = 2) -> None:
        """Free device memory."""

    async def wake(self, tags: list[str] | None = None) -> None:
        """Allocate device memory again, for `weights`, `kv_cache` or both."""

    async def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Connect to the trainer before the first push."""

    async def start_weight_update(self) -> None:
        """Start a weight push."""

    async def update_weights(self, update_info: dict[str, object]) -> None:
        """Load a push, or one chunk."""

    async def finish_weight_update(self, version: int) -> None:
        """Finish a push. Later responses carry this version."""

    async def weight_checksum(self) -> list[int]:
        """Return one weight checksum per device."""
        ...

    async def shutdown(self) -> None:
        """Stop the engine."""


class RequestBatch:
    """A batch in progress: passes responses from the engine to the collector.

    Requests arrive in groups: the initial one, and one for each `add`. The batch is complete when all groups are
    closed; a new group reopens it. `max_tokens` may be lowered while the batch runs, which cancels longer responses.

    Use it in one event loop. Other threads pass `add` and `close` to `loop.call_soon_threadsafe`, which keeps their
    order, and may read `max_tokens`.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._news = asyncio.Event()
        self._responses: list[tuple[int, Generation]] = []
        self._error: Exception | None = None
        self._num_requests = 0
        # Groups of requests without a call to `close` yet.
        self._num_open = 0

    def open(self, count: int) -> range:
        """Open a group of `count` requests and return the request numbers."""
        first, self._num_requests = self._num_requests, self._num_requests + count
        self._num_open += 1
        return range(first, first + count)

    def add(self, number: int, response: Generation) -> None:
        """Add the response to request `number`."""
        self._responses.append((number, response))
        self._news.set()

    def close(self, error: Exception | None = None) -> None:
        """Close a group after the last response, or fail the batch with `error`."""
        self._num_open, self._error = self._num_open - 1, self._error or error
        self._news.set()

    @property
    def is_complete(self) -> bool:
        """Whether all groups are closed."""
        return self._num_open == 0

    async def collect(self) -> Arrivals:
        """Return responses completed since the last call. Waits for one unless the batch is complete.

        Raises the error that failed the batch.
        """
        while not (self._responses or self._error or self.is_complete):
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        responses, self._responses = self._responses, []
        return Arrivals(responses, self.is_complete)

    async def all(self, count: int) -> list[Generation]:
        """Wait for a batch of `count` requests and return the responses in request order."""
        responses: dict[int, Generation] = {}
        is_last = False
        while not is_last:
            arrivals = await self.collect()
            responses |= arrivals.responses
            is_last = arrivals.is_last
        return [responses[number] for number in range(count)]


def eos_token_ids(model_path: str | Path) -> list[int]:
    """Return the sorted EOS token IDs from the generation config, or otherwise from the model or text config."""
    # The generation config comes first: for many chat models, only it lists the end-of-turn token.
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if file.exists():
            config = json.loads(file.read_text(encoding="utf-8"))
            ids = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
            if ids is not None:
                return sorted({ids} if isinstance(ids, int) else set(ids))
    raise UsageError(
        f"{model_path}: no eos_token_id in generation_config.json or config.json, so responses would never end"
    )


def check_lengths(requests: list[GenerationRequest], sampling: SamplingParams, *, max_model_len: int) -> None:
    """Raise UsageError if a prompt is empty or leaves no space for the response."""
    for index, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length == 0:
            raise UsageError(f"prompt {index} has no tokens")
        if length + request.limit(sampling) > max_model_len:
            raise UsageError(
                f"prompt {index} has {length} tokens; with max_new_tokens {request.limit(sampling)}, it exceeds the "
                f"engine's limit of {max_model_len} tokens"
            )


def check_pictures(requests: list[GenerationRequest], *, max_images: int | None) -> None:
    """Raise UsageError for too many images, or if image placeholders do not match the images."""
    # Checked before vLLM: after a prompt with a wrong number of images, vLLM fails all later requests too.
    for index, request in enumerate(requests):
        if not request.pictures:
            continue
        count = len(request.pictures)
        if not max_images:
            raise UsageError(f"prompt {index} has {count} images; the rollout engine's model supports only text")
        if count > max_images:
            raise UsageError(
                f"prompt {index} has {count} images; the engine's limit is {max_images} (--max_images_per_prompt)"
            )
        shortened = unexpanded(request.prompt_ids, request.pictures)
        placeholders = sum(shortened.count(token) for token in {placed.token for placed in request.pictures})
        if placeholders != count:
            raise UsageError(f"prompt {index} has {count} images and {placeholders} image placeholders")
