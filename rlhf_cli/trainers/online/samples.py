"""The samples of an online iteration: one record per response, and their columns up to the update."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Branch, Generation
from rlhf_cli.data.stored_arrays import Column
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
from rlhf_cli.models.vision.pictures import PlacedPicture
from rlhf_cli.rewards.records import Score


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to a prompt, with text and score.

    - `group`: position of the prompt in the run. A prompt that is sampled again becomes a new group.
    - `index`: position in the group, from 0; None for a greedy response, which is a baseline.
    - `text`: response without special tokens; for an episode, the last turn's text without tool calls.

    Example: the third of four responses to row 16 of sums.jsonl, sampled with the weights after iteration 12:

        Sample(
            Prompt([17, 10, 18, 28], "2+3=", "5", "sums.jsonl", 16),
            group=340,
            index=2,
            response=Generation([20, 2], [-0.1, -0.02], "stop", 12),
            text="5",
            score=Score(1.0, "correct"),
        ).id == "sums.jsonl:16/340.2@12"
    """

    prompt: Prompt
    group: int
    index: int | None
    response: Generation
    text: str
    score: Score

    @property
    def id(self) -> str:
        """`SOURCE:ROW/GROUP.SAMPLE@VERSION`, with the oldest weight version that sampled a token."""
        index = "greedy" if self.index is None else self.index
        return f"{self.prompt.source}:{self.prompt.index}/{self.group}.{index}@{self.response.weight_version}"

    @property
    def branches(self) -> tuple[Branch, ...]:
        """An episode's earlier conversations."""
        return () if self.response.episode is None else self.response.episode.earlier

    @property
    def sequence(self) -> TokenSequence:
        """Prompt and response, concatenated. Only sampled tokens are trained on."""
        response = self.response
        # An environment may have extended the prompt of the row.
        own = None if response.episode is None else response.episode.prompt_ids
        return _sequence(
            self.prompt.prompt_ids if own is None else own,
            response.token_ids,
            response.turns,
            pictures=self.prompt.pictures,
            teacher=self.prompt.teacher,
        )

    @property
    def teacher_sequence(self) -> TokenSequence:
        """Response after the prompt that the teacher reads."""
        ids = self.prompt.teacher_ids
        if ids is None:
            return self.sequence
        return _sequence(ids, self.response.token_ids, self.response.turns, teacher=self.prompt.teacher)

    @property
    def sequences(self) -> list[TokenSequence]:
        """Sequences to train on: an episode's earlier branches, then the response.

        Each sampled token is trained in exactly one of them.
        """
        teacher = self.prompt.teacher
        earlier = (_sequence(one.prompt_ids, one.token_ids, one.turns, teacher=teacher) for one in self.branches)
        return [*earlier, self.sequence]

    @property
    def observed_turns(self) -> Iterator[tuple[int, bytes]]:
        """Sampled tokens of each turn in training order, with the tokens of the observation before it: those since the
        previous turn, or all before the first turn of a conversation.
        """
        parts: list[Branch | Generation] = [*self.branches, self.response]
        for part, sequence in zip(parts, self.sequences, strict=True):
            seen, first = 0, len(sequence) - len(part.token_ids)
            for start, end in part.turns:
                yield end - start, sequence.token_ids[seen : first + start].tobytes()
                seen = first + end

    @property
    def routed_experts(self) -> list[np.ndarray | None]:
        """Experts that the rollout engine returned for each of `sequences`."""
        return [*(branch.routed_experts for branch in self.branches), self.response.routed_experts]


def _sequence(
    prompt_ids: list[int],
    response_ids: Sequence[int],
    turns: Sequence[tuple[int, int]],
    *,
    pictures: tuple[PlacedPicture, ...] = (),
    teacher: int = 0,
) -> TokenSequence:
    token_ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in (prompt_ids, response_ids)])
    is_sampled_T = np.zeros(token_ids.size, dtype=bool)
    for start, end in turns:
        is_sampled_T[len(prompt_ids) + start : len(prompt_ids) + end] = True
    return TokenSequence(token_ids, is_sampled_T, pictures, teacher=teacher)


Group = list[Sample]
"""All samples for a prompt, ordered by index."""


def flat(by_response: Sequence[Column]) -> torch.Tensor:
    """Concatenate a column of response tokens, `[N]`."""
    return torch.from_numpy(np.concatenate(by_response))


def scores_of(samples: Iterable[Sample]) -> list[Score]:
    """Return all scores."""
    return [sample.score for sample in samples]


def samples_of(groups: Iterable[Group]) -> Group:
    """Return the samples in all groups."""
    return [sample for group in groups for sample in group]


@dataclass
class Rollout:
    """Samples of one iteration with model outputs for their tokens.

    - `old_logprobs`, `values`: one value per response token from policy and critic, computed before the update; None
      without the model. `frozen_logprobs`: the same from each frozen policy by role, `{"ref": ..., "teacher": ...}`.
    - `teacher_spans`: span per response token, int64 [K], for teachers with their own tokenizers: the index where the
      span starts, -1 if the token is not compared, K and more for tokens without text. A teacher log-prob for a span is
      divided equally among the response tokens in it.
    - `bootstrap`: critic value of a truncated response's final state, 0 for finished responses; None without
      bootstrapping.
    - `step_rewards`: each step's reward at its last token, NaN elsewhere.
    - `advantages`: as used by the loss.

    Example: responses of 3 and 2 tokens: B = 2, N = 5, `cu` is [0, 3, 5], and `old_logprobs` are
    [[-0.2, -1.0, -0.1], [-0.4, -0.3]].
    """

    samples: Sequence[Sample]
    old_logprobs: Sequence[Column] | None = None
    frozen_logprobs: dict[str, Sequence[Column]] = field(default_factory=dict)
    teacher_spans: Sequence[np.ndarray] | None = None
    values: Sequence[Column] | None = None
    bootstrap: Sequence[float] | None = None
    step_rewards: Sequence[np.ndarray] | None = None
    advantages: Sequence[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def only(self, keep_B: Sequence[bool]) -> "Rollout":
        """Return the selected samples, in order."""
        kept = [number for number, is_kept in enumerate(keep_B) if is_kept]
        return self._each(lambda column: [column[number] for number in kept])

    def part(self, numbers: slice) -> "Rollout":
        """Return consecutive samples."""
        return self._each(lambda column: column[numbers])

    def _each(self, select: Callable[[Sequence[Any]], Sequence[Any]]) -> "Rollout":
        names = (column.name for column in fields(self) if column.name != "frozen_logprobs")
        columns = {name: column for name in names if (column := getattr(self, name)) is not None}
        return replace(
            self,
            frozen_logprobs={role: select(column) for role, column in self.frozen_logprobs.items()},
            **{name: select(column) for name, column in columns.items()},
        )

    def scored(self) -> "Rollout":
        """Return the samples with a valid score."""
        return self.only([score.value is not None for score in self.scores])

    def in_groups_of(self, others: "Rollout") -> "Rollout":
        """Return the samples with a group in `others`."""
        found = {sample.group for sample in others.samples}
        return self.only([sample.group in found for sample in self.samples])

    @cached_property
    def responses(self) -> list[Generation]:
        """Response of each sample."""
        return [sample.response for sample in self.samples]

    @cached_property
    def scores(self) -> list[Score]:
        """Score of each sample."""
        return scores_of(self.samples)

    @cached_property
    def groups(self) -> list[int]:
        """Group of each sample, numbered from 0 in order of appearance."""
        # Optimizer steps take groups in this order. Numbers in the run (`Sample.group`) do not ascend under dynamic
        # sampling.
        numbers: dict[int, int] = {}
        return [numbers.setdefault(sample.group, len(numbers)) for sample in self.samples]

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """Token sequences of all samples (prompt and response), preceded by earlier branches of episodes."""
        return [sequence for sample in self.samples for sequence in sample.sequences]

    @cached_property
    def replayed_sequences(self) -> list[TokenSequence]:
        """`sequences` for the actor, which replays the experts of the rollout engine. Other models choose their own."""
        experts = [own for sample in self.samples for own in sample.routed_experts]
        if all(own is None for own in experts):
            return self.sequences
        return [replace(sequence, routed_experts=own) for sequence, own in zip(self.sequences, experts, strict=True)]

    @cached_property
    def sequence_bounds(self) -> np.ndarray:
        """Bounds of samples in `sequences`, int64 [B + 1]."""
        return np.cumsum([0] + [len(sample.branches) + 1 for sample in self.samples])

    def by_response(self, columns: Sequence[Column]) -> list[Column]:
        """Convert token columns per sequence to columns per sample."""
        # Episodes with branches have several sequences, in different chunks of an object store: these are read.
        bounds = itertools.pairwise(self.sequence_bounds.tolist())
        return [columns[first] if end - first == 1 else np.concatenate(columns[first:end]) for first, end in bounds]

    @cached_property
    def rollout_logprobs(self) -> Sequence[Column]:
        """Sampler log-probs of response tokens in nats, float32."""
        return [np.asarray(response.logprobs, dtype=np.float32) for response in self.responses]

    def taught_sequences(self, tokens: Sequence[TeacherTokens]) -> list[TokenSequence]:
        """Return the sequences, with `teacher_reads` if the teacher has a different prompt or tokenizer.

        Args:
            tokens: per teacher; () if all teachers use the policy's tokens.
        """
        if tokens:
            return [
                tokens[sequence.teacher].sampled(sequence, sample.prompt.teacher_ids or ())
                for sequence, sample in zip(self.sequences, self.samples, strict=True)
            ]
        return [
            sequence if sample.prompt.teacher_ids is None else replace(sequence, teacher_reads=sample.teacher_sequence)
            for sequence, sample in zip(self.sequences, self.samples, strict=True)
        ]

    def read_stored(self) -> None:
        """Copy model outputs out of the object store, so that they outlive it."""

        def copied(column: Sequence[Column]) -> list[np.ndarray]:
            return [np.array(values) for values in column]

        self.old_logprobs = None if self.old_logprobs is None else copied(self.old_logprobs)
        self.values = None if self.values is None else copied(self.values)
        self.frozen_logprobs = {role: copied(column) for role, column in self.frozen_logprobs.items()}
        self.rollout_logprobs = copied(self.rollout_logprobs)

    @cached_property
    def cu(self) -> torch.Tensor:
        """Bounds of samples in arrays over all response tokens, int64 [B + 1]."""
        return torch.tensor(np.cumsum([0] + [response.num_sampled for response in self.responses]))

    @property
    def spans_N(self) -> torch.Tensor:
        """Span per token in arrays over all response tokens, int64 [N]. Numbers differ between responses."""
        assert self.teacher_spans is not None, "spans require a teacher with a different tokenizer"
        spans = [3 * first + own for first, own in zip(self.cu.tolist(), self.teacher_spans, strict=False)]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *spans]))

    @property
    def num_spans(self) -> int:
        """Number of compared spans."""
        assert self.teacher_spans is not None, "spans require a teacher with a different tokenizer"
        return sum(len(np.unique(own[(own >= 0) & (own < len(own))])) for own in self.teacher_spans)

    @cached_property
    def scores_B(self) -> torch.Tensor:
        """Scores, float64 [B]. All scores must be valid."""
        return torch.tensor([score.value for score in self.scores], dtype=torch.float64)

    @cached_property
    def parts(self) -> dict[str, torch.Tensor]:
        """Unweighted rewards, float64 [B], by name. All scores must be valid."""
        # All scores of a run have the same parts.
        names = self.scores[0].parts if self.scores else ()
        return {name: torch.tensor([score.parts[name] for score in self.scores], dtype=torch.float64) for name in names}

    @cached_property
    def groups_B(self) -> torch.Tensor:
        """Group number per sample, int64 [B]."""
        return torch.tensor(self.groups, dtype=torch.int64)

    @cached_property
    def truncated_B(self) -> torch.Tensor:
        """Whether each response was truncated, bool [B]."""
        cut = [response.finish_reason == "length" for response in self.responses]
        return torch.tensor(cut, dtype=torch.bool)

    def trained_B(self, policy: PolicyConfig) -> torch.Tensor:
        """Return whether each sample is trained on, bool [B]."""
        return ~self.truncated_B if policy.mask_truncated else torch.ones_like(self.truncated_B)
