"""Steps of sampled responses and the probability that each is right, by a process reward model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.data.solution_steps import Decode, token_step_ends, without_closing
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.errors import RunError
from rlhf_cli.models.reward_model import RewardModelPlan
from rlhf_cli.trainers.online.interfaces import ProcessRewardModel, awake


@dataclass(frozen=True)
class StepFinder:
    """Finds the steps of sampled tokens by their separator; `closing` tokens end a response and are no step.

    `last_separator` are the tokens of the separator for a model that reads one behind the last step too.
    """

    separator: str
    decode: Decode
    closing: frozenset[int] = field(default_factory=frozenset)
    last_separator: tuple[int, ...] = ()

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """Return the end of each step in tokens."""
        return token_step_ends(token_ids, self.separator, self.decode, closing=self.closing)

    def read(self, token_ids: Sequence[int]) -> tuple[Sequence[int], list[int]]:
        """Return the tokens of a response that the model reads, and the end of each step in them."""
        ends = self.ends(token_ids)
        if not ends or not self.last_separator:
            return token_ids, ends
        kept_ids = without_closing(token_ids, self.closing)
        is_ended = self.decode(kept_ids).endswith(self.separator) and len(kept_ids) not in ends[:-1]
        read_ids = kept_ids if is_ended else [*kept_ids, *self.last_separator]
        return read_ids, [*ends[:-1], len(read_ids)]


def at_step_ends(prompt: Prompt, response_ids: Sequence[int], ends: Sequence[int]) -> TokenSequence:
    """Return prompt and response end to end, marked at the last token of each step."""
    token_ids = np.array([*prompt.prompt_ids, *response_ids], dtype=np.int32)
    mask = np.zeros(token_ids.size, dtype=bool)
    mask[len(prompt.prompt_ids) - 1 + np.array(ends, dtype=np.int64)] = True
    return TokenSequence(token_ids, mask, prompt.pictures)


@dataclass(frozen=True)
class StepScorer:
    """A process reward model with the finder of the steps that it scores."""

    model: ProcessRewardModel
    finder: StepFinder

    def probabilities(self, prompts: Sequence[Prompt], generations: Sequence[Generation]) -> list[list[float]]:
        """Return the probability of each step of each response.

        Raises:
            RunError: the model gives a number that is not finite.
        """
        return [scores_K.tolist() for scores_K in self._scores(self._marked(prompts, generations))]

    def rewards(self, prompts: Sequence[Prompt], generations: Sequence[Generation]) -> list[np.ndarray]:
        """Return the probability of each step at its last token and NaN elsewhere, float32, one value a token of each
        response. Errors as for `probabilities`.
        """
        rewards = []
        for generation, scores_K in zip(generations, self._scores(self._marked(prompts, generations)), strict=True):
            placed_T = np.full(len(generation.token_ids), np.nan, dtype=np.float32)
            placed_T[np.array(self.finder.ends(generation.token_ids), dtype=np.int64) - 1] = scores_K
            rewards.append(placed_T)
        return rewards

    def _marked(self, prompts: Sequence[Prompt], generations: Sequence[Generation]) -> list[TokenSequence]:
        pairs = zip(prompts, generations, strict=True)
        return [at_step_ends(p, *self.finder.read(g.token_ids)) for p, g in pairs]

    def _scores(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        with awake(self.model):
            logits = self.model.step_scores(sequences)
        if not all(np.isfinite(logits_K).all() for logits_K in logits):
            raise RunError("the process reward model gives a step a score that is not finite: its weights are damaged")
        return [1 / (1 + np.exp(-logits_K.astype(np.float64))) for logits_K in logits]


def step_metrics(rewards: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the mean reward of the steps, and the mean number of steps of a response."""
    num_steps = [int(np.count_nonzero(~np.isnan(rewards_T))) for rewards_T in rewards]
    return {"step_reward": float(np.nanmean(np.concatenate(rewards))), "num_steps": float(np.mean(num_steps))}


def step_finder(model: RewardModelPlan, tokenizer: Any) -> StepFinder:
    """Return the finder of the steps that a process reward model has learned to score."""
    assert model.separator is not None, "not a process reward model"
    decode = partial(text_of, tokenizer, skip_special_tokens=False)
    return StepFinder(model.separator, decode, frozenset(tokenizer.all_special_ids), model.last_separator)
