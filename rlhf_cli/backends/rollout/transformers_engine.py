"""A rollout engine on plain transformers, for machines without vLLM: the verbs of `VllmEngine`.

Requests are cut into batches that run one after the other (`transformers_batch`). Leaves out refilling a batch as rows
end, tensor parallelism and weight pushes other than through shared memory.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from transformers import AutoConfig

from rlhf_cli.backends.rollout.engine import (
    Arrivals,
    EngineSettings,
    RequestBatch,
    check_lengths,
    check_pictures,
    eos_token_ids,
)
from rlhf_cli.backends.rollout.stop_strings import StopStrings, stop_strings
from rlhf_cli.backends.rollout.transformers_attention import GROUPED_DECODE
from rlhf_cli.backends.rollout.transformers_batch import TransformersBatch
from rlhf_cli.backends.rollout.transformers_cache import bytes_per_token
from rlhf_cli.backends.weight_sync.shm import read_verified_push
from rlhf_cli.backends.weight_sync.transfer import weights_checksum
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.checkpoint_names import as_in_checkpoint, copy_from_checkpoint, shapes_in_checkpoint
from rlhf_cli.models.compat import attention_name
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.loading import language_model_class, placed_on
from rlhf_cli.models.vision.attention import attention_of_parts
from rlhf_cli.models.vision.families.table import find_processing, takes_pictures
from rlhf_cli.models.vision.tower import PROCESSING, tower_of

Result = TypeVar("Result")


def load_for_decoding(model_path: str, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """Return the language model on the device, with its vision tower if it has one, and with the attention that decodes
    fastest there.
    """
    architecture = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    model = language_model_class(architecture).from_pretrained(
        model_path, dtype=dtype, trust_remote_code=trust_remote_code, **placed_on(device)
    )
    if takes_pictures(architecture):
        processing = find_processing(model_path, architecture, trust_remote_code=trust_remote_code)
        setattr(model, PROCESSING, processing)
    if device.type == "cpu" and attention_name(model.config) == "sdpa":
        model.set_attn_implementation(attention_of_parts(GROUPED_DECODE, architecture))
    return model.to(device).eval().requires_grad_(False)


class TransformersEngine:
    """Generates with a transformers model in this process; all work happens on one thread of its own."""

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        if settings.sync_backend != "shm":
            raise UsageError(
                f"--vllm_sync_backend {settings.sync_backend} needs vLLM; the transformers rollout backend takes shm"
            )
        self._settings = settings
        self._model_path = model_path
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._eos = torch.tensor(eos_token_ids(model_path), device=self._device)
        self._model = load_for_decoding(
            model_path,
            dtype=DTYPES[settings.dtype],
            device=self._device,
            trust_remote_code=settings.trust_remote_code,
        )
        self._tower = tower_of(self._model)
        self._version = 0
        self._pushed_checksum: int | None = None
        self._asleep = False
        self._updating = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        self._batch = _Batch(RequestBatch(0), SamplingParams(0))

    async def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Return one response per request, in their order; the same requests give the same responses from the same
        weights.
        """
        return await self._begin(requests, sampling).arrivals.all(len(requests))

    async def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch, whose responses are to be collected."""
        self._batch = self._begin(requests, sampling)

    async def add(self, requests: list[GenerationRequest]) -> None:
        """Join requests to the batch: they are generated together as soon as the engine is through with the rows that
        it works on.
        """
        batch = self._batch
        numbers = batch.arrivals.open(len(requests))
        try:
            self._check(requests, batch.sampling)
        except Exception as error:  # it belongs to whom collects
            batch.arrivals.close(error)
            return
        self._submit(batch, numbers, requests)

    async def collect(self) -> Arrivals:
        """Return the responses of the batch that finished since the last call; waits for one."""
        return await self._batch.arrivals.collect()

    async def cut(self, max_tokens: int) -> None:
        """Give up those responses of the batch that have, or get, more than so many tokens."""
        self._batch.arrivals.max_tokens = max_tokens

    def _begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> "_Batch":
        self._check(requests, sampling)
        batch = _Batch(RequestBatch(sampling.max_new_tokens), sampling)
        self._submit(batch, batch.arrivals.open(len(requests)), requests)
        return batch

    def _check(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        if self._asleep or self._updating:
            raise RunError("the rollout engine was asked to generate while asleep or between two sets of weights")
        check_lengths(requests, sampling, max_model_len=self._settings.max_model_len)
        check_pictures(requests, max_images=self._settings.max_images_per_prompt)

    def _submit(self, batch: "_Batch", numbers: range, requests: list[GenerationRequest]) -> None:
        for one in zip(numbers, requests, strict=True):
            batch.waiting.put(one)
        self._thread.submit(self._generate, batch)

    async def check_alive(self) -> None:
        """Nothing to check: the engine has no process of its own."""

    async def sleep(self, level: int = 2) -> None:
        """Move the weights to host memory; nothing is lost at any level."""
        self._asleep = True
        await self._run(self._leave_device)

    async def wake(self, tags: list[str] | None = None) -> None:
        """Move the weights back. Tags other than "weights" have nothing to wake."""
        if tags is None or "weights" in tags:
            await self._run(lambda: self._model.to(self._device))
        if tags is None or "kv_cache" in tags:
            self._asleep = False

    async def is_asleep(self) -> bool:
        """Return whether the engine sleeps, fully or in part."""
        return self._asleep

    async def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Nothing to agree on: pushes are files."""

    async def start_weight_update(self) -> None:
        """Open an update; until it is finished nothing can be generated."""
        self._updating = True

    async def update_weights(self, update_info: dict[str, object]) -> None:
        """Load a push's manifest; RunError, with the weights unchanged, where something about it is wrong."""
        if not self._updating:
            raise RunError("weight push: update_weights was called before start_weight_update")
        await self._run(lambda: self._load(update_info))

    async def finish_weight_update(self, version: int) -> None:
        """Close the update: responses carry this version from now on."""
        self._updating = False
        self._version = version

    async def abort_weight_update(self) -> None:
        """Close an update that failed; the weights are the former ones."""
        self._updating = False

    @property
    def weight_version(self) -> int:
        """Version of the last push; 0 for the weights the engine was built with."""
        return self._version

    async def weight_checksum(self) -> list[int]:
        """Checksum of the last push as it arrived, one per worker; equal to the sender's.

        Before the first push it is the checksum of the weights that the engine was built with.
        """
        if self._pushed_checksum is None:
            self._pushed_checksum = await self._run(
                lambda: weights_checksum(as_in_checkpoint(self._model, self._tensors().items()))
            )
        return [self._pushed_checksum]

    async def shutdown(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _leave_device(self) -> None:
        self._model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _tensors(self) -> dict[str, torch.Tensor]:
        tied = getattr(self._model, "_tied_weights_keys", None) or []
        tied_names = set(tied) if self._model.config.tie_word_embeddings else set()
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in tied_names}

    @torch.no_grad()
    def _load(self, manifest: dict[str, object]) -> None:
        own = self._tensors()
        optional = frozenset(self._model.state_dict()) - frozenset(own)
        expected: dict[str, tuple[int, ...]] = {}
        for name, tensor in own.items():
            expected |= shapes_in_checkpoint(self._model, name, tuple(tensor.shape), tensor.dtype)
        named_tensors, checksum = read_verified_push(manifest, expected, optional=optional)
        copy_from_checkpoint(self._model, own, dict(named_tensors))
        self._pushed_checksum = checksum

    @torch.inference_mode()
    def _generate(self, batch: "_Batch") -> None:
        """Generate for all requests of the batch that wait, which may be more than one part of it."""
        arrivals, sampling = batch.arrivals, batch.sampling
        try:
            stop = self._stop_strings(sampling)
            pending: dict[int, GenerationRequest] = {}
            while pending := pending | batch.arrived():
                numbers = self._wave(pending, sampling)
                wave = TransformersBatch(
                    self._model,
                    [pending.pop(number) for number in numbers],
                    sampling,
                    eos=self._eos,
                    stop=stop,
                    tower=self._tower,
                )
                wave.run(self._version, add=partial(_add, arrivals, numbers), max_tokens=lambda: arrivals.max_tokens)
        except Exception as error:  # of a thread: it belongs to whom collects
            arrivals.close(error)
        else:
            arrivals.close()

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.stop:
            return None
        return stop_strings(self._model_path, sampling.stop, trust_remote_code=self._settings.trust_remote_code)

    def _wave(self, requests: Mapping[int, GenerationRequest], sampling: SamplingParams) -> list[int]:
        """Return the numbers of the requests generated together: the shortest prompts, within the cache's size."""
        order = sorted(requests, key=lambda number: (len(requests[number].prompt_ids), number))
        per_token = bytes_per_token(self._model.config.get_text_config(), self._model.dtype)
        budget = self._settings.kv_cache_gib * 2**30
        wave: list[int] = []
        for number in order:
            length = len(requests[number].prompt_ids) + requests[number].limit(sampling)
            full = len(wave) == self._settings.max_num_seqs or (len(wave) + 1) * length * per_token > budget
            if wave and full:
                break
            wave.append(number)
        return wave


@dataclass(frozen=True)
class _Batch:
    """A batch: `waiting` has the requests, with their numbers, that the thread has not seen yet."""

    arrivals: RequestBatch
    sampling: SamplingParams
    waiting: SimpleQueue[tuple[int, GenerationRequest]] = field(default_factory=SimpleQueue)

    def arrived(self) -> dict[int, GenerationRequest]:
        """Return the requests since the last call, by number."""
        found: dict[int, GenerationRequest] = {}
        while not self.waiting.empty():  # one thread alone takes from it
            number, request = self.waiting.get_nowait()
            found[number] = request
        return found


def _add(batch: RequestBatch, indices: list[int], row: int, response: Generation) -> None:
    batch.add(indices[row], response)
