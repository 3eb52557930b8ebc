"""Rollout engine on plain transformers, for machines without vLLM.

Waiting requests take the rows of finished ones (`transformers_batch`). Tensor parallelism and weight pushes through
nccl or ipc are not supported.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from rlhf_cli.backends.weight_sync.shm import read_verified_push
from rlhf_cli.backends.weight_sync.transfer import weights_checksum
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.checkpoint_names import as_in_checkpoint, copy_from_checkpoint, shapes_in_checkpoint
from rlhf_cli.models.compat import attention_name
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.loading import language_model_class, placed_on
from rlhf_cli.models.mixers.layers import fix_model, refuse_own_states
from rlhf_cli.models.mixers.operations import wrap_operations
from rlhf_cli.models.mixers.remainders import keep_float32, take_remainders, with_remainders
from rlhf_cli.models.routing_replay import ExpertChoice
from rlhf_cli.models.vision.attention import attention_of_parts
from rlhf_cli.models.vision.families.table import find_processing, takes_pictures
from rlhf_cli.models.vision.tower import PROCESSING, tower_of

Result = TypeVar("Result")


def load_for_decoding(model_path: str, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """Load a language model, with vision encoder if any, and select the fastest attention for decoding.

    Raises UsageError for types whose states this engine cannot manage.
    """
    architecture = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    refuse_own_states(architecture)
    model = language_model_class(architecture).from_pretrained(
        model_path, dtype=dtype, trust_remote_code=trust_remote_code, **placed_on(device)
    )
    fix_model(model)
    keep_float32(model, model_path)
    # So that kernels for GPUs, if installed, are not called on a CPU.
    wrap_operations(model.get_decoder())
    if takes_pictures(architecture):
        processing = find_processing(model_path, architecture, trust_remote_code=trust_remote_code)
        setattr(model, PROCESSING, processing)
    # Sparse attention masks tokens for transformers' own functions only.
    text = model.config.get_text_config()
    is_sparse = "indexed_attention" in (getattr(text, "layer_types", None) or ())
    if device.type == "cpu" and attention_name(text) == "sdpa" and not is_sparse:
        model.set_attn_implementation(attention_of_parts(GROUPED_DECODE, architecture))
    if device.type == "cuda":
        # cuDNN plans attention anew for each new length of the cache, that is, for every token. On an H200 a step took
        # 84 ms, and 20 ms at lengths seen before. Measured before this line existed, on a GPU with other processes.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return model.to(device).eval().requires_grad_(False)


class TransformersEngine:
    """Generates with a transformers model in this process.

    All model work runs on one dedicated thread. The event loop stays responsive, and pushes, sleep and batches never
    overlap.
    """

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        if settings.sync_backend != "shm":
            raise UsageError(
                f"--vllm_sync_backend {settings.sync_backend} requires vLLM; "
                "the transformers rollout backend supports only shm"
            )
        self._settings = settings
        self._model_path = model_path
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._eos = eos_token_ids(model_path)
        self._model = load_for_decoding(
            model_path,
            dtype=DTYPES[settings.dtype],
            device=self._device,
            trust_remote_code=settings.trust_remote_code,
        )
        self._tower = tower_of(self._model)
        self._choice = ExpertChoice(self._model.get_decoder()) if settings.record_routed_experts else None
        self._version = 0
        self._pushed_checksum: int | None = None
        self._asleep = False
        self._updating = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        # Set by `begin`.
        self._batch: _Batch

    async def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Generate one response per request, in request order. Equal requests and weights give equal responses."""
        return await self._begin(requests, sampling).arrivals.all(len(requests))

    async def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch. Call `collect` for the responses."""
        self._batch = self._begin(requests, sampling)

    async def add(self, requests: list[GenerationRequest]) -> None:
        """Add requests to the batch. They take the rows of finished ones."""
        batch = self._batch
        numbers = batch.arrivals.open(len(requests))
        # The protocol requires that `collect` raises errors.
        try:
            self._check(requests, batch.sampling)
        except Exception as error:
            batch.arrivals.close(error)
            return
        self._submit(batch, numbers, requests)

    async def collect(self) -> Arrivals:
        """Return responses completed since the last call. Waits for one."""
        return await self._batch.arrivals.collect()

    async def cut(self, max_tokens: int) -> None:
        """Cancel responses that exceed `max_tokens`, now or later."""
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
        # In one piece: otherwise, the thread might read a part, and who is prefilled together would depend on the time.
        batch.waiting.put(dict(zip(numbers, requests, strict=True)))
        self._thread.submit(self._generate, batch, asyncio.get_running_loop())

    async def check_alive(self) -> None:
        """No-op: the engine has no separate process."""

    async def sleep(self, level: int = 2) -> None:
        """Move the weights to host memory. Every level keeps them."""
        self._asleep = True
        await self._run(self._leave_device)

    async def wake(self, tags: list[str] | None = None) -> None:
        """Move the weights back. There is no persistent KV cache to allocate."""
        if tags is None or "weights" in tags:
            await self._run(lambda: self._model.to(self._device))
        if tags is None or "kv_cache" in tags:
            self._asleep = False

    async def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """No-op: pushes are files."""

    async def start_weight_update(self) -> None:
        """Start an update. Generating fails until it is finished."""
        self._updating = True

    async def update_weights(self, update_info: dict[str, object]) -> None:
        """Load a push from a manifest. Raises RunError, with weights unchanged, if the push is invalid."""
        if not self._updating:
            raise RunError("weight push: update_weights was called before start_weight_update")
        await self._run(lambda: self._load(update_info))

    async def finish_weight_update(self, version: int) -> None:
        """Finish the update. Later responses carry this version."""
        self._updating = False
        self._version = version

    async def weight_checksum(self) -> list[int]:
        """Return the last push's checksum, which equals the sender's.

        Before the first push, this is the checksum of the initial weights.
        """
        if self._pushed_checksum is None:
            self._pushed_checksum = await self._run(
                lambda: weights_checksum(
                    as_in_checkpoint(self._model, with_remainders(self._model, self._tensors().items()))
                )
            )
        return [self._pushed_checksum]

    async def shutdown(self) -> None:
        """Stop the worker thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _leave_device(self) -> None:
        self._model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _tensors(self) -> dict[str, torch.Tensor]:
        # Tied weights appear twice in the state dict but only once in a checkpoint.
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
        pushed = dict(named_tensors)
        copy_from_checkpoint(self._model, own, pushed)
        take_remainders(self._model, pushed)
        self._pushed_checksum = checksum

    @torch.inference_mode()
    def _generate(self, batch: "_Batch", loop: asyncio.AbstractEventLoop) -> None:
        """Generate all waiting requests, which may include several groups, and those that arrive meanwhile."""
        arrivals, settings = batch.arrivals, self._settings
        # If the loop is closed, this raises and ends the thread's work, because nobody can read the responses.
        in_loop = loop.call_soon_threadsafe
        try:
            rows = TransformersBatch(
                self._model,
                batch.sampling,
                eos=self._eos,
                stop=self._stop_strings(batch.sampling),
                tower=self._tower,
                choice=self._choice if batch.sampling.returns_experts else None,
                max_rows=settings.max_num_seqs,
                cache_bytes=settings.kv_cache_gib * 2**30,
            )
            rows.run(
                self._version,
                arrived=batch.arrived,
                add=lambda number, response: in_loop(arrivals.add, number, response),
                max_tokens=lambda: arrivals.max_tokens,
            )
        # Nobody reads the thread's future; `collect` raises the error.
        except Exception as error:
            in_loop(arrivals.close, error)
        else:
            in_loop(arrivals.close)

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.stop:
            return None
        return stop_strings(self._model_path, sampling.stop, trust_remote_code=self._settings.trust_remote_code)


@dataclass(frozen=True)
class _Batch:
    """A batch with the queue of numbered requests that the thread has not read yet."""

    arrivals: RequestBatch
    sampling: SamplingParams
    waiting: SimpleQueue[dict[int, GenerationRequest]] = field(default_factory=SimpleQueue)

    def arrived(self) -> dict[int, GenerationRequest]:
        """Return requests added since the last call, by number."""
        added: dict[int, GenerationRequest] = {}
        # `empty` is reliable here, because only one thread reads from the queue.
        while not self.waiting.empty():
            added |= self.waiting.get_nowait()
        return added
