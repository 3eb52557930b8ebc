"""One batch of requests on a transformers model, from prefill to the last token.

Each distinct prompt is prefilled once for all samples, and finished rows are removed from the batch.
`transformers_engine` splits requests into batches.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlhf_cli.backends.rollout.stop_strings import StopStrings
from rlhf_cli.backends.rollout.transformers_cache import (
    decoding_cache,
    has_only_full_attention,
    join_caches,
    select_rows,
)
from rlhf_cli.backends.rollout.transformers_pictures import prefill_inputs
from rlhf_cli.backends.rollout.transformers_sampling import request_uniforms, sample_tokens
from rlhf_cli.data.packing.placing_pictures import rope_shift
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.models.vision.tower import VisionTower

# Prompt tokens per prefill pass, to limit activation memory.
_PREFILL_TOKENS = 16_384
# Fraction of finished rows at which the batch is compacted. Copying the cache takes about as long as a decoding step.
_FINISHED_SHARE = 0.2


class SampledResponses:
    """Tokens and log-probs sampled so far, by request."""

    def __init__(self, num_requests: int, limit: int) -> None:
        self._tokens = np.zeros((num_requests, limit), dtype=np.int64)
        self._logprobs = np.zeros((num_requests, limit), dtype=np.float32)

    def add(self, step: int, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Add the tokens sampled for these requests in this step."""
        self._tokens[rows, step] = tokens
        self._logprobs[rows, step] = logprobs

    def last(self, row: int, length: int, count: int) -> list[int]:
        """Return up to `count` last tokens for a request with `length` tokens."""
        return self._tokens[row, max(0, length - count) : length].tolist()

    def finished(self, row: int, length: int, *, stopped: bool, version: int) -> Generation:
        """Create the response for a request with `length` tokens."""
        return Generation(
            token_ids=self._tokens[row, :length].tolist(),
            logprobs=self._logprobs[row, :length].tolist(),
            finish_reason="stop" if stopped else "length",
            weight_version=version,
        )


class TransformersBatch:
    """A batch of requests. Each instance runs once."""

    def __init__(
        self,
        model: Any,
        requests: list[GenerationRequest],
        sampling: SamplingParams,
        *,
        eos: torch.Tensor,
        stop: StopStrings | None,
        tower: VisionTower | None = None,
    ) -> None:
        """Prepare a batch. `tower` is the model's vision encoder, for prompts with images."""
        self._model = model
        self._tower = tower
        self._sampling = sampling
        self._eos = torch.tensor(sorted({*eos.tolist(), *sampling.end_ids}), device=eos.device)
        self._stop = stop
        self._device = eos.device
        prompts = {request.prompt: request for request in requests}
        row_of = {prompt: index for index, prompt in enumerate(prompts)}
        # One request for each distinct prompt.
        self._prompts = list(prompts.values())
        self._prompt_rows = torch.tensor([row_of[request.prompt] for request in requests])
        self._width = max(len(request.prompt_ids) for request in self._prompts)
        self._limits = torch.tensor([request.limit(sampling) for request in requests], device=self._device)
        self._limit = int(self._limits.max())
        self._uniforms = request_uniforms([request.seed for request in requests], self._limit)
        self._config = model.config.get_text_config()
        self._mask_is_final = has_only_full_attention(self._config)
        # [rows, vocabulary]; only with a repetition penalty.
        self._seen: torch.Tensor | None = None

    def run(
        self,
        version: int,
        *,
        add: Callable[[int, Generation], None],
        max_tokens: Callable[[], int],
        hear: Callable[[int, int], None] | None = None,
    ) -> None:
        """Generate all responses. Calls `add(request number, response)` for each finished response.

        `max_tokens` is called after each token; longer responses are canceled. `hear(request number, token)` receives
        each token when it is sampled.
        """
        num_rows, limit = len(self._prompt_rows), self._limit
        responses = SampledResponses(num_rows, limit)
        uniforms = self._uniforms.to(self._device)
        # Request number for each row in the batch, which shrinks as rows finish.
        rows = torch.arange(num_rows, device=self._device)
        alive = torch.ones(num_rows, dtype=torch.bool, device=self._device)
        logits = self._prefill()
        for step in range(limit):
            token, logprob = sample_tokens(logits, uniforms[rows, step], self._sampling, seen_BV=self._seen)
            sampled = [part[alive].cpu().numpy() for part in (rows, token, logprob)]
            responses.add(step, *sampled)
            if hear is not None:
                for number, heard in zip(*sampled[:2], strict=True):
                    hear(int(number), int(heard))
            ended = alive & self._ends(token, rows, responses, step + 1)
            for row in rows[ended].tolist():
                add(row, responses.finished(row, step + 1, stopped=True, version=version))
            alive &= ~ended
            truncated = alive & (self._limits[rows] == step + 1)
            for row in rows[truncated].tolist():
                add(row, responses.finished(row, step + 1, stopped=False, version=version))
            alive &= ~truncated
            if step + 1 >= max_tokens() or not bool(alive.any()):
                break
            rows, token, alive = self._compact(rows, token, alive)
            logits = self._decode(token, step)

    def _ends(self, token: torch.Tensor, rows: torch.Tensor, responses: SampledResponses, length: int) -> torch.Tensor:
        """Return bool [rows]: whether a response ends with this token, which is token number `length`."""
        ends = torch.isin(token, self._eos)
        if (stop := self._stop) is not None:
            stopped = [stop.end(responses.last(row, length, stop.num_tokens)) for row in rows.tolist()]
            ends |= torch.tensor(stopped, device=self._device)
        return ends

    def _prefill(self) -> torch.Tensor:
        """Compute logits [rows, vocabulary] after the prompts. Fills cache and mask, with one row per request."""
        lengths = torch.tensor([len(prompt.prompt_ids) for prompt in self._prompts])
        # Left padding, so that all rows append new tokens at the same position.
        mask = torch.arange(self._width) >= (self._width - lengths)[:, None]
        input_ids = torch.zeros(mask.shape, dtype=torch.int64)
        input_ids[mask] = torch.tensor([token for prompt in self._prompts for token in prompt.prompt_ids])
        size = max(1, _PREFILL_TOKENS // self._width)
        parts = [self._prompts[first : first + size] for first in range(0, len(self._prompts), size)]
        passes = [
            self._forward_prompts(ids.to(self._device), part.to(self._device), prompts)
            for ids, part, prompts in zip(input_ids.split(size), mask.split(size), parts, strict=True)
        ]
        rows = self._prompt_rows.to(self._device)
        limit = self._limit
        self._cache = join_caches([cache for _, cache in passes], rows, capacity=self._width + limit)
        positions = lengths + torch.tensor([rope_shift(prompt.pictures) for prompt in self._prompts])
        self._positions = positions.to(self._device)[rows]
        # The mask covers all future tokens too, and each step takes a slice. Without padding, attention needs no mask.
        full_mask = torch.cat([mask, mask.new_ones(len(mask), limit)], dim=-1)
        self._mask = None if bool(mask.all()) else full_mask.to(self._device)[rows]
        logits = torch.cat([logits for logits, _ in passes])
        if self._sampling.repetition_penalty != 1:
            self._seen = _tokens_of(self._prompts, vocabulary=logits.shape[-1]).to(self._device)[rows]
        return logits[rows]

    def _forward_prompts(
        self, input_ids: torch.Tensor, mask: torch.Tensor, prompts: list[GenerationRequest]
    ) -> tuple[torch.Tensor, object]:
        cache = decoding_cache(self._config, capacity=self._width)
        # With images, the decoder runs on embeddings that contain image features. Logits only for the last position:
        # for all positions, they would take more memory than the rest of the prefill.
        if self._tower is not None and any(prompt.pictures for prompt in prompts):
            inputs = prefill_inputs(self._tower, prompts, mask)
            decoder = self._model.get_decoder()
            output = decoder(attention_mask=mask.long(), past_key_values=cache, use_cache=True, **inputs)
            return self._model.get_output_embeddings()(output.last_hidden_state[:, -1]), cache
        output = self._model(
            input_ids=input_ids,
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(-1) - 1).clamp_(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], cache

    def _decode(self, token: torch.Tensor, step: int) -> torch.Tensor:
        """Append one token per row and compute the next logits [rows, vocabulary]."""
        if self._seen is not None:
            self._seen.scatter_(1, token[:, None], True)
        output = self._model(
            input_ids=token[:, None],
            attention_mask=self._decode_mask(self._width + step + 1),
            position_ids=(self._positions + step)[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _decode_mask(self, length: int) -> torch.Tensor | None:
        """Return the attention mask for a new token, which excludes only padding."""
        if self._mask is None:
            return None
        # transformers uses a 4D mask unchanged, which avoids building one per step. Sliding-window layers need their
        # own.
        mask = self._mask[:, :length]
        return mask[:, None, None, :] if self._mask_is_final else mask.long()

    def _compact(
        self, rows: torch.Tensor, token: torch.Tensor, alive: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Remove finished rows once they make up `_FINISHED_SHARE` of the batch."""
        if int((~alive).sum()) < max(1.0, _FINISHED_SHARE * len(rows)):
            return rows, token, alive
        keep = alive.nonzero()[:, 0]
        select_rows(self._cache, keep)
        self._positions = self._positions[keep]
        self._mask = None if self._mask is None else self._mask[keep]
        self._seen = None if self._seen is None else self._seen[keep]
        return rows[keep], token[keep], alive[keep]


def _tokens_of(prompts: list[GenerationRequest], *, vocabulary: int) -> torch.Tensor:
    """Return bool [prompts, vocabulary]: whether a prompt contains a token."""
    seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt.prompt_ids] = True
    return seen
