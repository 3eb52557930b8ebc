"""Streams one response at a time from a transformers model in this process.

Prefill, cache, sampling and seeds are shared with the transformers engine, so `rlhf generate` produces the same
response for the same tokens and seed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from rlhf_cli.backends.rollout.engine import eos_token_ids
from rlhf_cli.backends.rollout.stop_strings import StopStrings
from rlhf_cli.backends.rollout.transformers_batch import TransformersBatch
from rlhf_cli.backends.rollout.transformers_engine import load_for_decoding
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.models.vision.tower import tower_of


@dataclass(frozen=True, slots=True)
class _StreamedResponse:
    """Sampled tokens, including the EOS token, and the finish reason."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length", "interrupted"]


class StreamingModel:
    """A transformers model on the GPU if available, otherwise on the CPU."""

    def __init__(
        self,
        model_path: str,
        tokenizer: object,
        *,
        dtype: torch.dtype,
        trust_remote_code: bool,
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_for_decoding(model_path, dtype=dtype, device=self.device, trust_remote_code=trust_remote_code)
        self._tower = tower_of(self.model)
        self._tokenizer = tokenizer
        self._eos = eos_token_ids(model_path)

    @torch.inference_mode()
    def respond(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        *,
        hear: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> _StreamedResponse:
        """Generate a response. After each token, `hear` receives it and `should_stop` can end the response."""
        stop = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        batch = TransformersBatch(self.model, sampling, eos=self._eos, stop=stop, tower=self._tower)
        waiting = [{0: request}]
        tokens: list[int] = []
        finished: list[Generation] = []

        def hear_token(_: int, token: int) -> None:
            tokens.append(token)
            hear(token)

        batch.run(
            0,
            arrived=lambda: waiting.pop() if waiting else {},
            add=lambda _, response: finished.append(response),
            max_tokens=lambda: 0 if should_stop() else sampling.max_new_tokens,
            hear=hear_token,
        )
        return _StreamedResponse(tokens, finished[0].finish_reason if finished else "interrupted")
