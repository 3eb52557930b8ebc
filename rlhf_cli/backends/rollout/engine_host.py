"""Hosts a rollout engine in a Ray worker process.

This module imports no training code, so that engine processes start quickly.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rlhf_cli.backends.rollout.engine import Arrivals, EngineSettings, RolloutEngine
from rlhf_cli.backends.rollout.torchvision_folder import use_torchvision
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.plugins import is_target, load_target
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.models.weight_files import folder_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HOST_ENGINE = "rlhf_cli.backends.rollout.engine_host:host_engine"
"""Import path of `host_engine`, which only engine processes import."""


def make_engine(backend: str, model_path: str, settings: EngineSettings) -> RolloutEngine:
    """Build a rollout engine in this process. Hub models are downloaded first."""
    model_path = str(folder_of(model_path))
    # Before anything imports transformers, which checks only once whether torchvision is installed.
    if backend == "vllm":
        use_torchvision(model_path)
    settings = fitted(settings, model_path)
    if backend == "vllm":
        from rlhf_cli.backends.rollout.vllm_engine import VllmEngine

        return VllmEngine(model_path, settings)
    if is_target(backend):
        own: RolloutEngine = load_target(backend)(model_path, settings)
        return own
    from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model_path, settings)


def fitted(settings: EngineSettings, model_path: str) -> EngineSettings:
    """Adapt the image settings to the model.

    The limit is None for text models, 0 for models that read only text, and at least one image for others.
    """
    # With a limit of 0, vLLM creates neither the processor nor the vision encoder, whose pushed weights it then skips.
    from transformers import AutoConfig

    from rlhf_cli.models.vision.families.table import is_text_only, takes_pictures

    architecture = AutoConfig.from_pretrained(model_path, trust_remote_code=settings.trust_remote_code)
    if not takes_pictures(architecture):
        return replace(settings, max_images_per_prompt=0 if is_text_only(architecture) else None)
    least, most = _pixel_bounds(settings, model_path, architecture)
    count = max(settings.max_images_per_prompt or 1, 1)
    return replace(settings, max_images_per_prompt=count, min_pixels=least, max_pixels=most)


def _pixel_bounds(
    settings: EngineSettings, model_path: str, architecture: "PretrainedConfig"
) -> tuple[int | None, int | None]:
    """Return the trainer's image size limits: the settings, clamped to the limits of the model's processor."""
    from rlhf_cli.models.vision.families.table import find_processing

    if settings.min_pixels is None and settings.max_pixels is None:
        return None, None
    processing = find_processing(
        model_path,
        architecture,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
        trust_remote_code=settings.trust_remote_code,
    )
    return processing.pixel_bounds or (None, None)


def host_engine(backend: str, model_path: str, settings: EngineSettings) -> "EngineHost":
    """Build an engine and wrap it for Ray calls."""
    decode = None if settings.decodes_for is None else _decoder(settings.decodes_for)
    return EngineHost(make_engine(backend, model_path, settings), decode, collect_seconds=settings.collect_seconds)


def _decoder(source: ModelSource) -> Callable[[Sequence[int]], str]:
    from rlhf_cli.data.tokenizing.decoding import text_of
    from rlhf_cli.models.tokenizers import load_tokenizer

    return partial(text_of, load_tokenizer(source), skip_special_tokens=True)


class EngineHost:
    """Receives Ray calls for an engine, and combines engine methods that always follow each other.

    Ray may reorder calls to an asyncio actor. Each call therefore carries an increasing batch number, and waits until
    the batch contains all earlier requests.

    With `decode`, responses are sent with their text and as arrays, so that the driver does not decode the responses of
    all engines. With `collect_seconds`, responses that complete within this time are sent together.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        decode: Callable[[Sequence[int]], str] | None = None,
        *,
        collect_seconds: float = 0.0,
    ) -> None:
        self.engine = engine
        self._decode = decode
        self._collect_seconds = collect_seconds
        # Signals a change of the pair (batch number, number of requests in the batch), which only grows.
        self._progress = asyncio.Condition()
        self._batch, self._num_requests = 0, 0
        # Error from `add`, raised by the next `collect`.
        self._add_error: Exception | None = None

    async def begin(
        self, batch: int, requests: list[GenerationRequest], sampling: SamplingParams, max_tokens: int | None
    ) -> Arrivals:
        """Start a batch, with a limit from an earlier `cut` if any, and wait for the first responses."""
        self._add_error = None
        await self.engine.begin(requests, sampling)
        if max_tokens is not None:
            await self.engine.cut(max_tokens)
        # After `begin` and before `collect`: waiting calls may start while this one waits for responses.
        await self._note(batch, len(requests))
        return await self._collect()

    async def add(self, batch: int, first: int, requests: list[GenerationRequest]) -> None:
        """Add requests as soon as the batch contains `first` requests. `collect` raises errors."""
        if await self._has(batch, first):
            # The driver does not wait for this call, so an error raised here would be lost.
            try:
                await self.engine.add(requests)
            except Exception as error:
                self._add_error = error
            # Also after an error: otherwise, a `collect` that waits for these requests would hang.
            await self._note(batch, first + len(requests))

    async def cut(self, batch: int, max_tokens: int) -> None:
        """Cancel responses that exceed `max_tokens`, now or later. No-op if a later batch has started."""
        if await self._has(batch, 0):
            await self.engine.cut(max_tokens)

    async def collect(self, batch: int, count: int) -> Arrivals:
        """Wait until the batch contains `count` requests, then return responses completed since the last call.

        Waits for a response unless the batch is complete.
        """
        if not await self._has(batch, count):
            return Arrivals([], is_last=True)
        if self._add_error is not None:
            raise self._add_error
        return await self._collect()

    async def _collect(self) -> Arrivals:
        arrivals = await self._gathered()
        if self._decode is None:
            return arrivals
        responses = [(number, decoded(response, self._decode)) for number, response in arrivals.responses]
        return replace(arrivals, responses=responses)

    async def _gathered(self) -> Arrivals:
        """Wait for a response, and for those that follow within `collect_seconds`."""
        arrivals, time = await self.engine.collect(), asyncio.get_running_loop().time
        end = time() + self._collect_seconds
        while not arrivals.is_last and (left := end - time()) > 0:
            with suppress(TimeoutError):
                more = await asyncio.wait_for(self.engine.collect(), left)
                arrivals = Arrivals(arrivals.responses + more.responses, more.is_last)
        return arrivals

    async def _note(self, batch: int, count: int) -> None:
        async with self._progress:
            self._batch, self._num_requests = batch, count
            self._progress.notify_all()

    async def _has(self, batch: int, count: int) -> bool:
        """Wait until the batch contains `count` requests. Returns false if a later batch has started."""
        async with self._progress:
            # Tuples compare the batch number first, so a later batch also ends the wait.
            await self._progress.wait_for(lambda: (self._batch, self._num_requests) >= (batch, count))
            return self._batch == batch

    async def take_push(self, manifest: dict[str, object], version: int) -> None:
        """Load a push from shared memory."""
        await self.engine.start_weight_update()
        await self.engine.update_weights(manifest)
        await self.engine.finish_weight_update(version)


def decoded(response: Generation, decode: Callable[[Sequence[int]], str]) -> Generation:
    """Return a response with its text, and with arrays instead of lists."""
    # float32, in which engines compute log-probs and ranks train on them.
    token_ids, logprobs = array("i", response.token_ids), array("f", response.logprobs)
    return replace(response, token_ids=token_ids, logprobs=logprobs, text=decode(response.token_ids))  # type: ignore[arg-type]
