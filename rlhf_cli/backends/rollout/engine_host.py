"""The process of one rollout engine: the engine, and verbs that always follow each other joined into one call.

Imports nothing that trains: the process of an engine starts as early as it can.
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_cli.backends.rollout.engine import Arrivals, EngineSettings, RolloutEngine
from rlhf_cli.backends.rollout.torchvision_folder import use_torchvision
from rlhf_cli.config.plugins import is_target, load_target
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.models.weight_files import folder_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HOST_ENGINE = "rlhf_cli.backends.rollout.engine_host:host_engine"
"""`host_engine` by name: only the process of an engine imports it."""


def make_engine(backend: str, model_path: str, settings: EngineSettings) -> RolloutEngine:
    """Return the rollout engine of that name, in this process; a model of the Hub is fetched to this machine first."""
    model_path = str(folder_of(model_path))
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
    """Return the settings for this model: without pictures for a model of text, with one at least for others.

    vLLM makes the processor of a vision-language model, and keeps its tower for pushes, if pictures are allowed.
    """
    from transformers import AutoConfig

    from rlhf_cli.models.vision.families.table import takes_pictures

    architecture = AutoConfig.from_pretrained(model_path, trust_remote_code=settings.trust_remote_code)
    if not takes_pictures(architecture):
        return replace(settings, max_images_per_prompt=None)
    least, most = _pixel_bounds(settings, model_path, architecture)
    count = max(settings.max_images_per_prompt or 1, 1)
    return replace(settings, max_images_per_prompt=count, min_pixels=least, max_pixels=most)


def _pixel_bounds(
    settings: EngineSettings, model_path: str, architecture: "PretrainedConfig"
) -> tuple[int | None, int | None]:
    """Return the trainer's bounds of a picture: the settings, within the bounds of the model's processor."""
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
    """Return the engine inside the object that a Ray worker calls."""
    return EngineHost(make_engine(backend, model_path, settings))


class EngineHost:
    """Holds an engine in its own process and joins verbs that always follow each other into one call.

    A Ray actor may run calls in another order than the caller made them, so calls about a batch name it by a number
    that grows, and wait until the batch has the requests before theirs.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._asked = asyncio.Condition()
        self._batch, self._num_requests = 0, 0
        self._fault: Exception | None = None  # of requests that should have joined the batch

    async def begin(
        self, batch: int, requests: list[GenerationRequest], sampling: SamplingParams, max_tokens: int | None
    ) -> Arrivals:
        """Start a batch, cut at the limit of before, and wait for its first responses."""
        self._fault = None
        await self.engine.begin(requests, sampling)
        if max_tokens is not None:
            await self.engine.cut(max_tokens)
        await self._note(batch, len(requests))
        return await self.engine.collect()

    async def add(self, batch: int, first: int, requests: list[GenerationRequest]) -> None:
        """Join requests to the batch as soon as it has the `first` ones. Nobody waits for this call: `collect` raises
        its error.
        """
        if await self._has(batch, first):
            try:
                await self.engine.add(requests)
            except Exception as error:
                self._fault = error
            await self._note(batch, first + len(requests))

    async def cut(self, batch: int, max_tokens: int) -> None:
        """Give up the responses of this batch that have, or get, more than so many tokens; do nothing if a later batch
        has begun.
        """
        if await self._has(batch, 0):
            await self.engine.cut(max_tokens)

    async def collect(self, batch: int, count: int) -> Arrivals:
        """Return the responses since the last call, as soon as the batch has `count` requests; wait for one."""
        if not await self._has(batch, count):
            return Arrivals([], is_last=True)
        if self._fault is not None:
            raise self._fault
        return await self.engine.collect()

    async def _note(self, batch: int, count: int) -> None:
        async with self._asked:
            self._batch, self._num_requests = batch, count
            self._asked.notify_all()

    async def _has(self, batch: int, count: int) -> bool:
        """Wait until the batch has so many requests; return whether it is the present batch."""
        async with self._asked:
            await self._asked.wait_for(lambda: (self._batch, self._num_requests) >= (batch, count))
            return self._batch == batch

    async def take_push(self, manifest: dict[str, object], version: int) -> None:
        """Load a push from shared memory."""
        await self.engine.start_weight_update()
        await self.engine.update_weights(manifest)
        await self.engine.finish_weight_update(version)
