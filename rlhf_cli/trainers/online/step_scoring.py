"""Steps of sampled responses and the probability that each is right, by a process reward model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.data.solution_steps import Decode, token_step_ends
from rlhf_cli.errors import RunError
from rlhf_cli.trainers.online.interfaces import ProcessRewardModel, awake


@dataclass(frozen=True)
class StepFinder:
    """Finds the steps of sampled tokens by their separator; `closing` tokens end a response and are no step."""

    separator: str
    decode: Decode
    closing: frozenset[int] = field(default_factory=frozenset)

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """Return the end of each step in tokens."""
        return token_step_ends(token_ids, self.separator, self.decode, closing=self.closing)


def at_step_ends(prompt_ids: Sequence[int], response_ids: Sequence[int], ends: Sequence[int]) -> TokenSequence:
    """Return prompt and response end to end, marked at the last token of each step."""
    token_ids = np.array([*prompt_ids, *response_ids], dtype=np.int32)
    mask = np.zeros(token_ids.size, dtype=bool)
    mask[len(prompt_ids) - 1 + np.array(ends, dtype=np.int64)] = True
    return TokenSequence(token_ids, mask)


def step_probabilities(
    model: ProcessRewardModel, finder: StepFinder, prompts: Sequence[Prompt], generations: Sequence[Generation]
) -> list[list[float]]:
    """Return the probability of each step of each response.

    Raises:
        RunError: the model gives a number that is not finite.
    """
    pairs = zip(prompts, generations, strict=True)
    sequences = [
        at_step_ends(prompt.prompt_ids, generation.token_ids, finder.ends(generation.token_ids))
        for prompt, generation in pairs
    ]
    with awake(model):
        logits = model.step_scores(sequences)
    if not all(np.isfinite(logits_K).all() for logits_K in logits):
        raise RunError("the process reward model gives a step a score that is not finite: its weights are damaged")
    return [(1 / (1 + np.exp(-logits_K.astype(np.float64)))).tolist() for logits_K in logits]
