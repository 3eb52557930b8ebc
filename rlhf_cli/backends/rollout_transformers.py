"""A rollout engine on plain transformers, for machines without vLLM: the verbs of rollout_vllm.VllmEngine.

Each distinct prompt is prefilled once, its samples share the result; rows that ended leave the batch. Leaves out
continuous batching, tensor parallelism and weight pushes other than through shared memory.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rlhf_cli.backends.rollout_cache import bytes_per_token, decoding_cache, has_only_full_attention, select_rows
from rlhf_cli.backends.rollout_engine import EngineSettings, check_lengths, eos_token_ids
from rlhf_cli.backends.rollout_sampling import request_uniforms, sample_tokens
from rlhf_cli.backends.weight_transfer import weights_checksum
from rlhf_cli.backends.weight_transfer_shm import read_verified_push
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, UsageError

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PREFILL_TOKENS = 16_384  # prompt tokens of one forward pass: bounds its activations
_FINISHED_SHARE = 0.2  # of a batch's rows before the rest is copied together; a copy costs about a step

Result = TypeVar("Result")


class TransformersEngine:
    """Generates with a transformers model in this process; all work happens on one thread of its own."""

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        if settings.sync_backend != "shm":
            raise UsageError(
                f"--vllm_sync_backend {settings.sync_backend} needs vLLM; the transformers rollout backend takes shm"
            )
        if settings.tensor_parallel_size != 1:
            raise UsageError("--vllm_tensor_parallel_size needs vLLM; the transformers rollout backend uses one device")
        self._settings = settings
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._eos = torch.tensor(eos_token_ids(model_path), device=self._device)
        model = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=_DTYPES[settings.dtype],
            attn_implementation="sdpa",
            trust_remote_code=settings.trust_remote_code,
        )
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._version = 0
        self._pushed_checksum: int | None = None
        self._asleep = False
        self._updating = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")

    async def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """One response per request, in their order; the same requests give the same responses from the same weights."""
        if self._asleep or self._updating:
            raise RunError("the rollout engine was asked to generate while asleep or between two sets of weights")
        check_lengths(requests, sampling, max_model_len=self._settings.max_model_len)
        return await self._run(lambda: self._generate(requests, sampling))

    async def sleep(self, level: int = 2) -> None:
        """Moves the weights to host memory; nothing is lost at any level."""
        self._asleep = True
        await self._run(lambda: self._model.to("cpu"))

    async def wake(self, tags: list[str] | None = None) -> None:
        """Moves the weights back. Tags other than "weights" have nothing to wake."""
        if tags is None or "weights" in tags:
            await self._run(lambda: self._model.to(self._device))
        if tags is None or "kv_cache" in tags:
            self._asleep = False

    async def is_asleep(self) -> bool:
        """Whether the engine sleeps, fully or in part."""
        return self._asleep

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Nothing to agree on: pushes are files."""

    async def start_weight_update(self) -> None:
        """Opens an update; until it is finished nothing can be generated."""
        self._updating = True

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a push's manifest; RunError, with the weights unchanged, where something about it is wrong."""
        if not self._updating:
            raise RunError("weight push: update_weights was called before start_weight_update")
        await self._run(lambda: self._load(update_info))

    async def finish_weight_update(self, version: int) -> None:
        """Closes the update: responses carry this version from now on."""
        self._updating = False
        self._version = version

    async def abort_weight_update(self) -> None:
        """Closes an update that failed; the weights are the former ones."""
        self._updating = False

    @property
    def weight_version(self) -> int:
        """Version of the last push; 0 for the weights the engine was built with."""
        return self._version

    async def weight_checksum(self) -> list[int]:
        """Checksum of the last push as it arrived, one per worker; equal to the sender's.

        Before the first push, that of the weights the engine was built with.
        """
        if self._pushed_checksum is None:
            self._pushed_checksum = await self._run(lambda: weights_checksum(self._tensors().items()))
        return [self._pushed_checksum]

    async def shutdown(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tied = getattr(self._model, "_tied_weights_keys", None) or []
        tied_names = set(tied) if self._model.config.tie_word_embeddings else set()
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in tied_names}

    @torch.no_grad()
    def _load(self, manifest: dict[str, Any]) -> None:
        own = self._tensors()
        optional = frozenset(self._model.state_dict()) - frozenset(own)
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        named_tensors, checksum = read_verified_push(manifest, shapes, optional=optional)
        for name, tensor in named_tensors:
            if name in own:
                own[name].copy_(tensor)
        self._pushed_checksum = checksum

    @torch.inference_mode()
    def _generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        generations: list[Generation | None] = [None] * len(requests)
        for indices in self._waves(requests, sampling):
            wave = _Wave(self._model, [requests[index] for index in indices], sampling, self._eos)
            for index, generation in zip(indices, wave.run(self._version), strict=True):
                generations[index] = generation
        return [generation for generation in generations if generation is not None]

    def _waves(self, requests: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[int]]:
        """Indices of the requests generated together: prompts of similar length, within the cache's size."""
        order = sorted(range(len(requests)), key=lambda index: (len(requests[index].prompt_ids), index))
        per_token = bytes_per_token(self._model.config.get_text_config(), self._model.dtype)
        budget = self._settings.kv_cache_gib * 2**30
        wave: list[int] = []
        for index in order:
            length = len(requests[index].prompt_ids) + sampling.max_new_tokens
            full = len(wave) == self._settings.max_num_seqs or (len(wave) + 1) * length * per_token > budget
            if wave and full:
                yield wave
                wave = []
            wave.append(index)
        if wave:
            yield wave


class _Wave:
    """One batch of requests from prefill to their last token."""

    def __init__(
        self, model: Any, requests: list[GenerationRequest], sampling: SamplingParams, eos: torch.Tensor
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._eos = eos
        self._device = eos.device
        prompts = list(dict.fromkeys(tuple(request.prompt_ids) for request in requests))
        row = {prompt: index for index, prompt in enumerate(prompts)}
        self._prompts = prompts
        self._prompt_of_row = torch.tensor([row[tuple(request.prompt_ids)] for request in requests])
        self._width = max(map(len, prompts))
        self._uniforms = request_uniforms([request.seed for request in requests], sampling.max_new_tokens)
        self._uniforms = self._uniforms.to(self._device)
        config = model.config.get_text_config()
        self._mask_in_4d = has_only_full_attention(config)
        self._cache = decoding_cache(config, capacity=self._width + sampling.max_new_tokens)

    def run(self, version: int) -> list[Generation]:
        """The wave's responses in the order of its requests."""
        num_rows, limit = len(self._prompt_of_row), self._sampling.max_new_tokens
        tokens = np.zeros((num_rows, limit), dtype=np.int64)
        logprobs = np.zeros((num_rows, limit), dtype=np.float32)
        lengths = np.full(num_rows, limit)
        stopped = np.zeros(num_rows, dtype=bool)
        rows = torch.arange(num_rows, device=self._device)  # request of each row of the batch
        alive = torch.ones(num_rows, dtype=torch.bool, device=self._device)
        logits = self._prefill()
        for step in range(limit):
            token, logprob = sample_tokens(logits, self._uniforms[rows, step], self._sampling)
            ended = alive & torch.isin(token, self._eos)
            where = rows[alive].cpu().numpy()
            tokens[where, step] = token[alive].cpu().numpy()
            logprobs[where, step] = logprob[alive].cpu().numpy()
            ends = rows[ended].cpu().numpy()
            lengths[ends], stopped[ends] = step + 1, True
            alive &= ~ended
            if step + 1 == limit or not bool(alive.any()):
                break
            rows, token, alive = self._compact(rows, token, alive)
            logits = self._decode(token, step)
        return [
            Generation(
                token_ids=tokens[row, :length].tolist(),
                logprobs=logprobs[row, :length].tolist(),
                finish_reason="stop" if stop else "length",
                weight_version=version,
            )
            for row, (length, stop) in enumerate(zip(lengths, stopped, strict=True))
        ]

    def _prefill(self) -> torch.Tensor:
        """Logits [rows, vocabulary] after the prompts; fills the cache and the mask, one row per request."""
        lengths = torch.tensor([len(prompt) for prompt in self._prompts])
        columns = torch.arange(self._width)
        mask = columns >= (self._width - lengths)[:, None]  # left padding
        input_ids = torch.zeros(mask.shape, dtype=torch.int64)
        input_ids[mask] = torch.tensor([token for prompt in self._prompts for token in prompt])
        position_ids = (mask.cumsum(-1) - 1).clamp_(min=0)
        logits = self._forward_prompts(input_ids.to(self._device), mask.to(self._device), position_ids.to(self._device))
        index = self._prompt_of_row.to(self._device)
        select_rows(self._cache, index)
        lengths = lengths.to(self._device)
        self._lengths = lengths[index]
        room = mask.new_ones(len(self._prompts), self._sampling.max_new_tokens)
        self._mask = torch.cat([mask, room], dim=-1).to(self._device)[index]
        self._is_padded = not bool(mask.all())
        return logits[index]

    def _forward_prompts(self, input_ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=input_ids,
            attention_mask=mask.long(),
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _decode(self, token: torch.Tensor, step: int) -> torch.Tensor:
        """Logits [rows, vocabulary] after one more token per row."""
        mask = None
        if self._is_padded:
            mask = self._mask[:, : self._width + step + 1]
            mask = mask[:, None, None, :] if self._mask_in_4d else mask.long()
        output = self._model(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=(self._lengths + step)[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _compact(
        self, rows: torch.Tensor, token: torch.Tensor, alive: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drops the rows that ended, once they are a fair share of the batch."""
        if int((~alive).sum()) < max(1.0, _FINISHED_SHARE * len(rows)):
            return rows, token, alive
        keep = alive.nonzero()[:, 0]
        select_rows(self._cache, keep)
        self._lengths, self._mask = self._lengths[keep], self._mask[keep]
        return rows[keep], token[keep], alive[keep]
