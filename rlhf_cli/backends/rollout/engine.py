"""The common part of rollout engines: protocol, settings, ends of responses, and the error of a dead engine."""

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlhf_cli.config.rollout import SyncBackend
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.vision.pictures import unexpanded

_WAIT_SECONDS = 1.0  # that a thread waits for a response at a stretch: it must not outlive a call that was cancelled


class EngineDead(RunError):
    """A process of a rollout engine has ended; the engine cannot be used any more and has to be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How a rollout engine is built; the same for both engines.

    `max_model_len` bounds prompt plus response in tokens. `num_threads` are CPU threads of one worker (None: all
    cores this process may use). `kv_cache_gib` bounds the KV cache if there is no GPU, whose share is
    `gpu_memory_utilization` instead; it is fixed rather than measured, so that the schedule of a batch, and with it
    every rounding, is the same in every process. `max_num_seqs` bounds the sequences of a step where vLLM does not know
    the card: on a CPU, and with transformers. `vllm_args` are further engine arguments of vLLM, which win
    over all others. With `max_lora_rank`, one of vLLM's values, pushes are of adapters alone and the model stays.
    `max_images_per_prompt` bounds the pictures of a prompt; None for models without a vision tower. `min_pixels` and
    `max_pixels` are the trainer's bounds of a picture; both None if they are the bounds of the model's processor.
    """

    max_model_len: int
    dtype: str = "bf16"
    seed: int = 0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool | None = None  # None: on a CPU
    enable_prefix_caching: bool = True
    enable_sleep: bool = False
    sync_backend: SyncBackend = "shm"
    trust_remote_code: bool = False
    num_threads: int | None = None
    max_num_seqs: int = 256
    kv_cache_gib: int = 1
    vllm_args: Mapping[str, object] = field(default_factory=dict)
    max_lora_rank: int | None = None
    max_images_per_prompt: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The news of a batch since the last look.

    `responses` are (number of the request in the batch, response); `is_last` is true if no more will come, unless
    requests are added.
    """

    responses: list[tuple[int, Generation]]
    is_last: bool


class RolloutEngine(Protocol):
    """An engine in its own process: one batch of requests at a time, and weights that are replaced between batches.

    An engine is built with the path of a model and `EngineSettings`.
    """

    async def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Return the responses to a batch, in its order."""
        ...

    async def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch; the place of a request in the list is its number."""

    async def add(self, requests: list[GenerationRequest]) -> None:
        """Join requests to the batch, also when all its responses have come; their numbers go on from the batch's.

        Errors are raised by `collect`.
        """

    async def collect(self) -> Arrivals:
        """Return the responses since the last call; wait for one if more are to come."""
        ...

    async def cut(self, max_tokens: int) -> None:
        """Give up the responses that have more tokens; 0 gives up the batch."""

    async def check_alive(self) -> None:
        """Raise EngineDead if the engine cannot generate any more."""

    async def sleep(self, level: int = 2) -> None:
        """Free the memory of the device."""

    async def wake(self, tags: list[str] | None = None) -> None:
        """Take memory again, for `weights`, `kv_cache` or both."""

    async def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Prepare for the first push of weights."""

    async def start_weight_update(self) -> None:
        """Begin a push of weights."""

    async def update_weights(self, update_info: dict[str, object]) -> None:
        """Load a part of a push."""

    async def finish_weight_update(self, version: int) -> None:
        """End a push, after which responses have this version."""

    async def abort_weight_update(self) -> None:
        """Give up a push that failed."""

    async def weight_checksum(self) -> list[int]:
        """Return a checksum of the weights, one for each device."""
        ...

    async def shutdown(self) -> None:
        """End the engine."""


class RequestBatch:
    """A batch in the making: responses on their way from an engine to whom collects them.

    Requests come in parts: those that begin the batch, and those that are added. The batch is complete when each part
    is closed, and another part opens it again. `max_tokens` may be lowered while the batch runs: responses with more
    tokens than that are given up. Takes no notice of threads and event loops.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._change = threading.Condition()
        self._responses: list[tuple[int, Generation]] = []
        self._error: Exception | None = None
        self._num_requests = 0
        self._num_open = 0  # parts

    def open(self, count: int) -> range:
        """Return the numbers of `count` requests, which are one part of the batch."""
        with self._change:
            first, self._num_requests = self._num_requests, self._num_requests + count
            self._num_open += 1
            return range(first, first + count)

    def add(self, number: int, response: Generation) -> None:
        """Add the response to the request of that number."""
        with self._change:
            self._responses.append((number, response))
            self._change.notify_all()

    def close(self, error: Exception | None = None) -> None:
        """End a part, because all its responses have come, or the batch because of an error."""
        with self._change:
            self._num_open, self._error = self._num_open - 1, self._error or error
            self._change.notify_all()

    @property
    def is_complete(self) -> bool:
        """Whether no part is open."""
        return self._num_open == 0

    async def collect(self) -> Arrivals:
        """Return the responses since the last call; wait for one while there is any to come. Raise the error that
        closed the batch.
        """
        while not (arrivals := self._take()):
            await asyncio.to_thread(self._wait)
        return arrivals

    async def all(self, count: int) -> list[Generation]:
        """Return the responses to a batch of `count` requests, in their order."""
        found: dict[int, Generation] = {}
        is_last = False
        while not is_last:
            arrivals = await self.collect()
            found |= arrivals.responses
            is_last = arrivals.is_last
        return [found[number] for number in range(count)]

    def _take(self) -> Arrivals | None:
        with self._change:
            if self._error is not None:
                raise self._error
            if not (self._responses or self.is_complete):
                return None
            responses, self._responses = self._responses, []
            return Arrivals(responses, self.is_complete)

    def _wait(self) -> None:
        with self._change:
            if not (self._responses or self._error or self.is_complete):
                self._change.wait(_WAIT_SECONDS)


def eos_token_ids(model_path: str | Path) -> list[int]:
    """Return the token ids that end a response, sorted: from the model's generation config, else from its config or
    the part of it about text.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if file.exists():
            named = json.loads(file.read_text(encoding="utf-8"))
            found = named.get("eos_token_id", (named.get("text_config") or {}).get("eos_token_id"))
            if found is not None:
                return sorted({found} if isinstance(found, int) else set(found))
    raise UsageError(
        f"{model_path}: neither generation_config.json nor config.json names an eos_token_id, "
        "so that no response would ever end"
    )


def check_lengths(requests: list[GenerationRequest], sampling: SamplingParams, *, max_model_len: int) -> None:
    """Raise UsageError if a prompt is empty or leaves no room for its response."""
    for index, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length == 0:
            raise UsageError(f"prompt {index} has no tokens")
        if length + request.limit(sampling) > max_model_len:
            raise UsageError(
                f"prompt {index} has {length} tokens; with max_new_tokens {request.limit(sampling)} that is more "
                f"than the {max_model_len} tokens the engine was built for"
            )


def check_pictures(requests: list[GenerationRequest], *, max_images: int | None) -> None:
    """Raise UsageError if a prompt has more pictures than the engine was built for, or other placeholders than theirs.

    vLLM must never see such a prompt: after a wrong number of pictures it fails every later one too.
    """
    for index, request in enumerate(requests):
        if not request.pictures:
            continue
        count = len(request.pictures)
        if max_images is None:
            raise UsageError(f"prompt {index} has {count} pictures; the model of the rollout engine takes text alone")
        if count > max_images:
            raise UsageError(
                f"prompt {index} has {count} pictures; the engine was built for {max_images} (--max_images_per_prompt)"
            )
        shortened = unexpanded(request.prompt_ids, request.pictures)
        placeholders = sum(shortened.count(token) for token in {placed.token for placed in request.pictures})
        if placeholders != count:
            raise UsageError(f"prompt {index} has {count} pictures and {placeholders} image placeholders")
