"""Step detection in sampled responses, and step scores from a process reward model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.solution_steps import Decode, token_step_ends, without_closing
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.errors import RunError
from rlhf_cli.models.reward_model import RewardModelPlan
from rlhf_cli.trainers.online.interfaces import ProcessRewardModel
from rlhf_cli.trainers.online.samples import Sample


@dataclass(frozen=True)
class StepFinder:
    """Finds steps in sampled tokens by their separator; `closing` tokens end a response and are not part of a step.

    `last_separator` are separator tokens for models that require one after the last step.
    """

    separator: str
    decode: Decode
    closing: frozenset[int] = field(default_factory=frozenset)
    last_separator: tuple[int, ...] = ()

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """Return each step's end in tokens."""
        return token_step_ends(token_ids, self.separator, self.decode, closing=self.closing)

    def read(self, token_ids: Sequence[int]) -> tuple[Sequence[int], list[int]]:
        """Return a response's tokens as input for the model, and each step's end in them."""
        ends = self.ends(token_ids)
        if not ends or not self.last_separator:
            return token_ids, ends
        kept_ids = without_closing(token_ids, self.closing)
        # The separator may be incomplete if the response was truncated within it.
        is_ended = self.decode(kept_ids).endswith(self.separator) and len(kept_ids) not in ends[:-1]
        read_ids = kept_ids if is_ended else [*kept_ids, *self.last_separator]
        return read_ids, [*ends[:-1], len(read_ids)]


def _at_step_ends(prompt: Prompt, response_ids: Sequence[int], ends: Sequence[int]) -> TokenSequence:
    """Concatenate prompt and response, with the last token of each step as target."""
    token_ids = np.array([*prompt.prompt_ids, *response_ids], dtype=np.int32)
    mask = np.zeros(token_ids.size, dtype=bool)
    mask[len(prompt.prompt_ids) - 1 + np.array(ends, dtype=np.int64)] = True
    return TokenSequence(token_ids, mask, prompt.pictures)


@dataclass(frozen=True)
class StepScorer:
    """A process reward model with its step finder."""

    model: ProcessRewardModel
    finder: StepFinder

    def probabilities(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Return each step's probability per response.

        Raises:
            RunError: the model returns a non-finite number.
        """
        return [scores_K.tolist() for scores_K in self._scores(samples)]

    def rewards(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return each step's probability at its last token and NaN elsewhere, float32, one value per response token.
        Raises like `probabilities`.
        """
        rewards = []
        for sample, scores_K in zip(samples, self._scores(samples), strict=True):
            token_ids = sample.response.token_ids
            placed_T = np.full(len(token_ids), np.nan, dtype=np.float32)
            placed_T[np.array(self.finder.ends(token_ids), dtype=np.int64) - 1] = scores_K
            rewards.append(placed_T)
        return rewards

    def _scores(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        sequences = [_at_step_ends(one.prompt, *self.finder.read(one.response.token_ids)) for one in samples]
        logits = self.model.step_scores(sequences)
        if not all(np.isfinite(logits_K).all() for logits_K in logits):
            raise RunError("the process reward model returned a non-finite step score: its weights are damaged")
        # float64, because exp overflows in float32 for confident scores.
        return [1 / (1 + np.exp(-logits_K.astype(np.float64))) for logits_K in logits]


def step_metrics(rewards: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the mean step reward, and the mean number of steps per response."""
    num_steps = [int(np.count_nonzero(~np.isnan(rewards_T))) for rewards_T in rewards]
    return {"step_reward": float(np.nanmean(np.concatenate(rewards))), "num_steps": float(np.mean(num_steps))}


def step_finder(model: RewardModelPlan, tokenizer: Any) -> StepFinder:
    """Return the step finder for a process reward model."""
    assert model.separator is not None, "not a process reward model"
    decode = partial(text_of, tokenizer, skip_special_tokens=False)
    return StepFinder(model.separator, decode, frozenset(tokenizer.all_special_ids), model.last_separator)
