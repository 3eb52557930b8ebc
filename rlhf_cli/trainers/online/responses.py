"""Responses of an online iteration, from scoring to the update's samples."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch

from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Branch, Generation
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.groups import PromptGroup


@dataclass
class Responses:
    """Responses of one iteration. All lists are per response.

    - `groups`: group number per response. Responses to a prompt form a group; a prompt may be sampled more than once.
    - `positions`: index among all responses of the iteration.
    - `old_logprobs`, `ref_logprobs`, `teacher_logprobs`, `values`: one value per response token from policy, reference,
      teacher and critic, computed before the update; None without the model.
    - `bootstrap`: critic value of a truncated response's final state, 0 for finished responses; None without
      bootstrapping.
    - `step_rewards`: each step's reward at its last token, NaN elsewhere.
    """

    prompts: Sequence[Prompt]
    generations: Sequence[Generation]
    score_requests: Sequence[ScoreRequest]
    scores: Sequence[Score]
    groups: Sequence[int]
    positions: Sequence[int] | None = None
    old_logprobs: Sequence[np.ndarray] | None = None
    ref_logprobs: Sequence[np.ndarray] | None = None
    teacher_logprobs: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None
    bootstrap: Sequence[float] | None = None
    step_rewards: Sequence[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.generations)

    def only(self, keep_B: Sequence[bool]) -> "Responses":
        """Return the selected responses, in order."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = [number for number, is_kept in enumerate(keep_B) if is_kept]
        return replace(
            self,
            **{name: [column[number] for number in kept] for name, column in columns.items() if column is not None},
        )

    def scored(self) -> "Responses":
        """Return the responses with a valid score."""
        return self.only([score.value is not None for score in self.scores])

    def in_groups_of(self, others: "Responses") -> "Responses":
        """Return the responses with a group in `others`."""
        found = set(others.groups)
        return self.only([group in found for group in self.groups])

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """Token sequences of all responses (prompt and response), preceded by earlier branches of episodes."""
        pairs = zip(self.prompts, self.generations, strict=True)
        return [sequence for prompt, generation in pairs for sequence in as_sequences(prompt, generation)]

    @cached_property
    def sequence_bounds(self) -> np.ndarray:
        """Bounds of responses in `sequences`, int64 [B + 1]."""
        return np.cumsum([0] + [len(branches_of(generation)) + 1 for generation in self.generations])

    def by_response(self, columns: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Convert token columns per sequence to columns per response."""
        bounds = itertools.pairwise(self.sequence_bounds.tolist())
        return [columns[first] if end - first == 1 else np.concatenate(columns[first:end]) for first, end in bounds]

    @cached_property
    def rollout_logprobs(self) -> list[np.ndarray]:
        """Sampler log-probs of response tokens in nats, float32."""
        return [np.array(generation.logprobs, dtype=np.float32) for generation in self.generations]

    @cached_property
    def cu(self) -> torch.Tensor:
        """Bounds of responses in arrays over all response tokens, int64 [B + 1]."""
        return torch.tensor(np.cumsum([0] + [generation.num_sampled for generation in self.generations]))

    @cached_property
    def scores_B(self) -> torch.Tensor:
        """Scores, float64 [B]. All scores must be valid."""
        return torch.tensor([score.value for score in self.scores], dtype=torch.float64)

    @cached_property
    def parts(self) -> dict[str, torch.Tensor]:
        """Unweighted rewards, float64 [B], by name. All scores must be valid."""
        names = self.scores[0].parts if self.scores else ()
        return {name: torch.tensor([score.parts[name] for score in self.scores], dtype=torch.float64) for name in names}

    @cached_property
    def groups_B(self) -> torch.Tensor:
        """Group number per response, int64 [B]."""
        return torch.tensor(self.groups, dtype=torch.int64)

    @cached_property
    def truncated_B(self) -> torch.Tensor:
        """Whether each response was truncated, bool [B]."""
        cut = [generation.finish_reason == "length" for generation in self.generations]
        return torch.tensor(cut, dtype=torch.bool)

    def trained_B(self, policy: PolicyConfig) -> torch.Tensor:
        """Return whether each response is trained on, bool [B]."""
        return ~self.truncated_B if policy.mask_truncated else torch.ones_like(self.truncated_B)


def as_sequence(prompt: Prompt, generation: Generation) -> TokenSequence:
    """Concatenate prompt and response. Only sampled tokens are trained on."""
    sequence = _sequence(prompt_of(prompt, generation), generation.token_ids, generation.turns)
    return replace(sequence, pictures=prompt.pictures)


def as_sequences(prompt: Prompt, generation: Generation) -> list[TokenSequence]:
    """Return sequences to train on: an episode's earlier branches, then the response.

    Each sampled token is trained in exactly one of them.
    """
    earlier = (_sequence(branch.prompt_ids, branch.token_ids, branch.turns) for branch in branches_of(generation))
    return [*earlier, as_sequence(prompt, generation)]


def branches_of(generation: Generation) -> tuple[Branch, ...]:
    """Return an episode's earlier conversations."""
    return () if generation.episode is None else generation.episode.earlier


def _sequence(prompt_ids: list[int], response_ids: list[int], turns: Sequence[tuple[int, int]]) -> TokenSequence:
    token_ids = np.array(prompt_ids + response_ids, dtype=np.int32)
    is_sampled_T = np.zeros(token_ids.size, dtype=bool)
    for start, end in turns:
        is_sampled_T[len(prompt_ids) + start : len(prompt_ids) + end] = True
    return TokenSequence(token_ids, is_sampled_T)


def prompt_of(prompt: Prompt, generation: Generation) -> list[int]:
    """Return the prompt used for sampling, which an environment may have extended."""
    own = generation.episode.prompt_ids if generation.episode is not None else None
    return prompt.prompt_ids if own is None else own


def of_groups(groups: Sequence[PromptGroup]) -> Responses:
    """Return all groups' responses."""
    return Responses(
        [group.prompt for group in groups for _ in group.scores],
        [generation for group in groups for generation in group.generations],
        [request for group in groups for request in group.score_requests],
        [score for group in groups for score in group.scores],
        [number for number, group in enumerate(groups) for _ in group.scores],
        range(sum(len(group.scores) for group in groups)),
    )
