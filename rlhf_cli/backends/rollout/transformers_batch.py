"""A batch of requests on a transformers model. Waiting requests take the rows of finished ones.

Each step appends one token to all rows:

    sample -> deliver finished responses -> remove their rows -> decode -> prefill requests that join -> sample ...

Rows are left-padded, so that they all end at the same column. Example with prompts (p) of 2, 3 and 1 tokens: response
(r) 1 is finished after two tokens, and a request with a prompt of 4 tokens takes its row. Columns that no row needs
any longer are dropped.

    . p p r r        p p r r r
    p p p r r   ->   . p r r r
    . . p r r        . p p p p
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from transformers import Cache

from rlhf_cli.backends.rollout.stop_strings import StopStrings
from rlhf_cli.backends.rollout.transformers_cache import (
    append_rows,
    bytes_per_token,
    decoding_cache,
    has_only_full_attention,
    join_caches,
    select_rows,
    state_bytes,
)
from rlhf_cli.backends.rollout.transformers_sampling import request_uniforms, sample_tokens
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.packing.placing_pictures import rope_shift
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.models.routing_replay import ExpertChoice
from rlhf_cli.models.vision.tower import VisionTower

# Prompt tokens per prefill pass, to limit activation memory.
_PREFILL_TOKENS = 16_384
# Fraction of finished rows at which they are removed. Copying the cache takes about as long as a decoding step.
_FINISHED_SHARE = 0.2


@dataclass(slots=True)
class _Row:
    """A response in progress. A finished one may stay for some steps, in which it samples tokens that nobody reads.

    - `first_position`: position of its first token, which images may shift.
    - `experts`: experts [tokens, layers, top_k] of the prompt, then of each sampled token that was decoded.
    """

    number: int
    request: GenerationRequest
    limit: int
    first_position: int
    uniforms: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    is_finished: bool = False

    @property
    def length(self) -> int:
        """Tokens in prompt and response."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that the response may still get."""
        return self.limit - len(self.token_ids)

    def generation(self, reason: Literal["stop", "length"], version: int) -> Generation:
        """Return the response."""
        experts = np.concatenate(self.experts) if self.experts else None
        # Copies, because the row may continue to sample.
        return Generation([*self.token_ids], [*self.logprobs], reason, version, routed_experts=experts)


class TransformersBatch:
    """Rows in progress. Each instance runs once."""

    def __init__(
        self,
        model: Any,
        sampling: SamplingParams,
        *,
        eos: list[int],
        stop: StopStrings | None,
        tower: VisionTower | None = None,
        choice: ExpertChoice | None = None,
        max_rows: int = 1,
        cache_bytes: int = 0,
    ) -> None:
        """Create a batch without rows. `tower` is the model's vision encoder, for prompts with images. With `choice`,
        responses name the experts of their tokens.

        At most `max_rows` rows run at once, with a cache of at most `cache_bytes`. One row is always allowed.
        """
        self._model = model
        self._tower = tower
        self._choice = choice
        self._sampling = sampling
        self._end_ids = sampling.all_end_ids(eos)
        self._stop = stop
        self._device = model.device
        self._config = model.config.get_text_config()
        self._max_rows = max_rows
        self._cache_bytes = cache_bytes
        self._token_bytes, self._state_bytes = bytes_per_token(self._config, model.dtype), state_bytes(model)
        # Other caches, such as sliding windows, have no columns to align: requests join when no row is left.
        self._has_full_attention = has_only_full_attention(self._config)
        self._rows: list[_Row] = []
        # Filled columns of the cache.
        self._width = 0
        self._mask: torch.Tensor | None = None
        # [rows, vocabulary]; only with a repetition penalty.
        self._seen: torch.Tensor | None = None

    def run(
        self,
        version: int,
        *,
        arrived: Callable[[], dict[int, GenerationRequest]],
        add: Callable[[int, Generation], object],
        max_tokens: Callable[[], int],
        hear: Callable[[int, int], None] | None = None,
    ) -> None:
        """Generate all responses. Calls `add(request number, response)` for each finished response.

        `arrived` and `max_tokens` are called for each token. `arrived` returns requests added since its last call, by
        number. Responses longer than `max_tokens` are canceled; 0 cancels waiting requests too. `hear(request number,
        token)` receives each token when it is sampled.
        """
        waiting: dict[int, GenerationRequest] = {}
        logits: torch.Tensor | None = None
        has_space = True
        while True:
            waiting |= arrived()
            if has_space and waiting:
                logits, has_space = self._join(waiting, logits), False
            if logits is None:
                return
            tokens = self._sample(logits, hear)
            for row in self._rows:
                reason = None if row.is_finished else self._finish_reason(row)
                if reason is not None:
                    row.is_finished = True
                    add(row.number, row.generation(reason, version))
            longest = max_tokens()
            if longest == 0:
                return
            self._cancel_longer(longest, is_last=not (waiting and self._has_full_attention))
            kept = self._remove_finished(tokens)
            has_space |= len(kept) < len(tokens)
            logits = self._decode(kept) if self._rows else None

    def _sample(self, logits: torch.Tensor, hear: Callable[[int, int], None] | None) -> torch.Tensor:
        """Sample a token for each row, and return them as a tensor [rows]."""
        # A finished row at its limit uses its last number again.
        numbers = [row.uniforms[min(len(row.token_ids), row.limit - 1)] for row in self._rows]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        tokens, logprobs = sample_tokens(logits, uniforms, self._sampling, seen_BV=self._seen)
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            # Finished rows stop at their limit, because positions may end there too.
            if row.num_left:
                row.token_ids.append(token)
                row.logprobs.append(logprob)
            if hear is not None and not row.is_finished:
                hear(row.number, token)
        return tokens

    def _finish_reason(self, row: _Row) -> Literal["stop", "length"] | None:
        if row.token_ids[-1] in self._end_ids or (self._stop is not None and self._stop.end(row.token_ids)):
            return "stop"
        return None if row.num_left else "length"

    def _cancel_longer(self, max_tokens: int, *, is_last: bool) -> None:
        """Cancel rows that exceed `max_tokens`. `is_last`: no waiting request will join rows of this batch."""
        running = [row for row in self._rows if not row.is_finished]
        too_long = [row for row in running if len(row.token_ids) >= max_tokens]
        # On a CPU, runs must be reproducible: at a random time, another request would take the row, which changes the
        # rounding of its neighbors.
        if self._device.type != "cpu" or (is_last and len(too_long) == len(running)):
            for row in too_long:
                row.is_finished = True

    def _remove_finished(self, tokens: torch.Tensor) -> torch.Tensor:
        """Remove finished rows once they make up `_FINISHED_SHARE` of the batch. Returns the tokens of the others."""
        keep = [index for index, row in enumerate(self._rows) if not row.is_finished]
        if keep and len(tokens) - len(keep) < max(1.0, _FINISHED_SHARE * len(tokens)):
            return tokens
        self._rows = [self._rows[index] for index in keep]
        indices = torch.tensor(keep, dtype=torch.int64, device=self._device)
        if keep:
            select_rows(self._cache, indices)
            self._mask = None if self._mask is None else self._mask[indices]
        self._seen = None if self._seen is None else self._seen[indices]
        return tokens[indices]

    def _fitting(self, waiting: dict[int, GenerationRequest]) -> list[int]:
        """Select the requests that join: the shortest prompts for which there are rows and KV cache."""
        if self._rows and not self._has_full_attention:
            return []
        # Shortest first, to reduce padding.
        order = sorted(waiting, key=lambda number: (len(waiting[number].prompt_ids), number))
        width = max((row.length for row in self._rows), default=0)
        num_left = max((row.num_left for row in self._rows), default=0)
        fitting: list[int] = []
        for number in order:
            width = max(width, len(waiting[number].prompt_ids))
            num_left = max(num_left, waiting[number].limit(self._sampling))
            count = len(self._rows) + len(fitting) + 1
            needed = count * (self._token_bytes * (width + num_left) + self._state_bytes)
            if count > 1 and (count > self._max_rows or needed > self._cache_bytes):
                break
            fitting.append(number)
        return fitting

    def _join(self, waiting: dict[int, GenerationRequest], logits: torch.Tensor | None) -> torch.Tensor | None:
        """Append rows for the requests that fit, which leave `waiting`. Returns the logits of all rows."""
        joining = [self._row(number, waiting.pop(number)) for number in self._fitting(waiting)]
        if not joining:
            return logits
        rows = [*self._rows, *joining]
        width = max(row.length for row in rows)
        capacity = width + max(row.num_left for row in rows)
        joined_logits, cache = self._prefill(joining, capacity=capacity)
        if logits is None:
            self._cache = cache
        else:
            append_rows(self._cache, cache, width=width, capacity=capacity)
            joined_logits = torch.cat([logits, joined_logits])
        self._rows, self._width = rows, width
        # The mask covers all future tokens too, and each step takes a slice. Without padding, attention needs no mask.
        mask = _left_padded([row.length for row in rows], width=width, capacity=capacity)
        self._mask = None if bool(mask.all()) else mask.to(self._device)
        if self._sampling.repetition_penalty != 1:
            self._seen = _tokens_of(rows, vocabulary=joined_logits.shape[-1]).to(self._device)
        return joined_logits

    def _row(self, number: int, request: GenerationRequest) -> _Row:
        limit = request.limit(self._sampling)
        first_position = len(request.prompt_ids) + rope_shift(request.pictures)
        return _Row(number, request, limit, first_position, request_uniforms([request.seed], limit)[0].numpy())

    def _prefill(self, rows: list[_Row], *, capacity: int) -> tuple[torch.Tensor, Cache]:
        """Compute logits [rows, vocabulary] after the prompts, and the cache with one row per request."""
        # One request for each distinct prompt, and its index for each row.
        distinct = {row.request.prompt: row.request for row in rows}
        prompts, index_of = [*distinct.values()], {prompt: index for index, prompt in enumerate(distinct)}
        indices = torch.tensor([index_of[row.request.prompt] for row in rows], device=self._device)
        lengths = [len(prompt.prompt_ids) for prompt in prompts]
        mask = _left_padded(lengths, width=max(lengths), capacity=max(lengths))
        input_ids = torch.zeros(mask.shape, dtype=torch.int64)
        input_ids[mask] = torch.tensor([token for prompt in prompts for token in prompt.prompt_ids])
        size = max(1, _PREFILL_TOKENS // max(lengths))
        parts = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        passes = [
            self._forward_prompts(ids.to(self._device), part.to(self._device), some)
            for ids, part, some in zip(input_ids.split(size), mask.split(size), parts, strict=True)
        ]
        experts = [own for _, _, found in passes for own in found]
        for row in rows if experts else ():
            row.experts.append(experts[index_of[row.request.prompt]])
        cache = join_caches([cache for _, cache, _ in passes], indices, capacity=capacity)
        return torch.cat([logits for logits, _, _ in passes])[indices], cache

    def _forward_prompts(
        self, input_ids: torch.Tensor, mask: torch.Tensor, prompts: list[GenerationRequest]
    ) -> tuple[torch.Tensor, Cache, list[np.ndarray]]:
        """Return logits, cache, and the experts of each prompt, none without `choice`."""
        if self._choice is None:
            return *self._logits_of_prompts(input_ids, mask, prompts), []
        with self._choice.recorded() as experts:
            logits, cache = self._logits_of_prompts(input_ids, mask, prompts)
        by_row = experts().reshape(*mask.shape, *experts().shape[1:])
        return logits, cache, [own[is_token] for own, is_token in zip(by_row, mask.cpu().numpy(), strict=True)]

    def _logits_of_prompts(
        self, input_ids: torch.Tensor, mask: torch.Tensor, prompts: list[GenerationRequest]
    ) -> tuple[torch.Tensor, Cache]:
        cache = decoding_cache(self._config, capacity=mask.shape[1])
        # With images, the decoder runs on embeddings that contain image features. Logits only for the last position:
        # for all positions, they would take more memory than the rest of the prefill.
        if self._tower is not None and any(prompt.pictures for prompt in prompts):
            inputs = _prefill_inputs(self._tower, prompts, mask)
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

    def _decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token per row and compute the next logits [rows, vocabulary]."""
        if self._seen is not None:
            self._seen.scatter_(1, tokens[:, None], True)
        self._width += 1
        positions = torch.tensor([row.first_position + len(row.token_ids) - 1 for row in self._rows])
        mask = None if self._mask is None else self._mask[:, : self._width]
        if mask is not None:
            # transformers uses a 4D mask unchanged, which avoids building one per step. Sliding-window layers need
            # their own. Recurrent layers need none: the state of a row contains no padding.
            mask = mask[:, None, None, :] if self._has_full_attention else mask.long()
        with nullcontext() if self._choice is None else self._choice.recorded() as experts:
            output = self._model(
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=positions[:, None].to(self._device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        for row, own in zip(self._rows, experts(), strict=True) if experts else ():
            row.experts.append(own[None])
        return output.logits[:, -1]


def _left_padded(lengths: list[int], *, width: int, capacity: int) -> torch.Tensor:
    """Return bool [rows, capacity]: false for the padding of rows that end at column `width`."""
    return torch.arange(capacity) >= width - torch.tensor(lengths)[:, None]


def _tokens_of(rows: list[_Row], *, vocabulary: int) -> torch.Tensor:
    """Return bool [rows, vocabulary]: whether a row's prompt or response contains a token."""
    seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool)
    for index, row in enumerate(rows):
        seen[index, row.request.prompt_ids + row.token_ids] = True
    return seen


def _prefill_inputs(tower: VisionTower, prompts: Sequence[GenerationRequest], mask_BW: torch.Tensor) -> dict[str, Any]:
    """Build the decoder arguments for prompts padded to width W; `mask_BW` is false for padding.

    Padding has zero embeddings and positions.
    """
    # Through the trainer's packing code, so that prefill uses exactly the features and positions seen in training.
    sequences = [
        TokenSequence(np.array(prompt.prompt_ids, np.int32), np.zeros(len(prompt.prompt_ids), bool), prompt.pictures)
        for prompt in prompts
    ]
    inputs: dict[str, Any] = tower.decoder_inputs(pack(sequences).to(mask_BW.device))
    embedded_BWD = _padded(inputs.pop("inputs_embeds").movedim(-1, 0), mask_BW).movedim(0, -1)
    padded = {name: _padded(value, mask_BW) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return {**inputs, "inputs_embeds": embedded_BWD, **padded}


def _padded(values: torch.Tensor, mask_BW: torch.Tensor) -> torch.Tensor:
    """Convert packed values [..., 1, T] to padded rows [..., B, W]."""
    padded = values.new_zeros(*values.shape[:-2], *mask_BW.shape)
    padded[..., mask_BW] = values[..., 0, :]
    return padded
