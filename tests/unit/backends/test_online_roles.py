"""Distribution of batches to ranks and engines, and reassembly: sample order does not depend on the layout."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from remote_calls import recorded
from tiny_training import make_sequences

from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.backends.roles.groups import ActorRole, FrozenPolicyRole, RewardRole
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.rollout.engine import Arrivals
from rlhf_cli.backends.rollout.engine_shares import SharedBatch, balanced_shares, same_shares
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.models.reward_model import ScoreStatistics
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels

LAYOUTS = [(1, 1000, None), (1, 20, None), (2, 25, None), (3, 1000, 1), (8, 12, None)]


class SleepingRank:
    """A rank that records its calls; a call fails if `error` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        def record(*args: object, **options: object) -> list[Any]:
            self.calls.append(name)
            if self._error is not None and name == "logprobs":
                raise self._error
            return []

        return record


class OneRank:
    """The only rank of a role, and the number of remote calls."""

    def __init__(self, rank: SleepingRank) -> None:
        self.rank, self.num_calls = rank, 0

    def all(self, call: Callable[..., Any]) -> list[Any]:
        return self.all_each(lambda rank, _: call(rank), [None])

    def all_each(self, call: Callable[..., Any], work: list[Any]) -> list[Any]:
        self.num_calls += 1
        return [call(self.rank, *work)]

    all_stored = all_each


@pytest.mark.parametrize(("takes_turns", "around"), [(True, ("wake", "sleep")), (False, ())])
def test_a_role_wakes_computes_and_sleeps_in_one_call(takes_turns, around):
    group = OneRank(SleepingRank())
    role = ActorRole(group, planner(1, 1000, None), takes_turns=takes_turns)  # type: ignore[arg-type]
    role.logprobs([])
    assert group.rank.calls == [*around[:1], "logprobs", *around[1:]]
    assert group.num_calls == 1


@pytest.mark.parametrize("takes_turns", [True, False])
def test_after_an_update_only_the_weights_stay_on_the_gpus(takes_turns):
    group = OneRank(SleepingRank())
    role = ActorRole(group, planner(1, 1000, None), takes_turns=takes_turns)  # type: ignore[arg-type]
    weights = LossWeights({}, EntropyState(0.0, True))
    role.update([], [], on_policy=True, weights=weights)
    role.wake_weights()
    woken = ["wake", "update", "sleep_optimizer", "wake", "sleep_optimizer"]
    assert group.rank.calls == (woken if takes_turns else ["update"])


def test_a_rank_that_fails_does_not_sleep_before_it_reports_the_error():
    group = OneRank(SleepingRank(ValueError("no")))
    role = ActorRole(group, planner(1, 1000, None), takes_turns=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no"):
        role.logprobs([])
    assert group.rank.calls == ["wake", "logprobs"]


class FakeGroup:
    """Ranks that return ten times the id for every trained token."""

    METHODS = ("logprobs", "scores")

    def __init__(self) -> None:
        self.micro_batches: list[list[int]] = []

    def all_each(self, call: Callable[..., Any], work: list[RankWork]) -> list[Any]:
        assert recorded(call, RankWork([[]]))[0] in self.METHODS
        return [self._rank(*share.steps) for share in work]

    all_stored = all_each

    def _rank(self, micro_batches: list[list[TokenSequence]]) -> list[np.ndarray]:
        self.micro_batches.append([sum(len(sequence) for sequence in batch) for batch in micro_batches])
        return [
            np.concatenate([np.zeros(0), *(10.0 * s.token_ids[s.loss_mask] for s in batch)]) for batch in micro_batches
        ]


def planner(num_ranks: int, max_tokens: int, max_sequences: int | None) -> MicroBatchPlanner:
    batch = BatchConfig(train_max_tokens_per_gpu=max_tokens, micro_train_batch_size=max_sequences)
    return MicroBatchPlanner(num_ranks, batch, quadratic_cost=0.01)


@pytest.mark.parametrize(("num_ranks", "max_tokens", "max_sequences"), LAYOUTS)
def test_results_come_back_to_their_sequences(num_ranks, max_tokens, max_sequences):
    sequences, group = make_sequences(7), FakeGroup()
    role = FrozenPolicyRole(group, planner(num_ranks, max_tokens, max_sequences), takes_turns=False)  # type: ignore[arg-type]
    results = role.logprobs(sequences)
    for sequence, result in zip(sequences, results, strict=True):
        assert np.asarray(result).tolist() == (10.0 * sequence.token_ids[sequence.loss_mask]).tolist()
    assert len(group.micro_batches) == num_ranks
    assert len({len(batches) for batches in group.micro_batches}) == 1
    assert all(size <= max_tokens for batches in group.micro_batches for size in batches)


@pytest.mark.parametrize(("num_ranks", "max_tokens", "max_sequences"), LAYOUTS)
def test_a_reward_model_reads_the_last_token_of_each_sequence(num_ranks, max_tokens, max_sequences):
    sequences, group = make_sequences(7), FakeGroup()
    deal = planner(num_ranks, max_tokens, max_sequences)
    reward = RewardRole(group, deal, takes_turns=False)  # type: ignore[arg-type]
    assert reward.scores(sequences) == [10.0 * sequence.token_ids[-1] for sequence in sequences]


def test_scores_are_normalised_by_the_statistics_of_the_model():
    sequences, deal = make_sequences(3), planner(1, 1000, None)
    statistics = ScoreStatistics(mean=4.0, std=2.0)
    reward = RewardRole(FakeGroup(), deal, takes_turns=False)  # type: ignore[arg-type]
    reward.statistics = statistics
    assert reward.scores(sequences) == [(10.0 * sequence.token_ids[-1] - 4.0) / 2.0 for sequence in sequences]


@pytest.mark.parametrize(("num_ranks", "max_tokens", "max_sequences"), LAYOUTS)
def test_every_sample_of_a_step_is_trained_once_with_the_totals_of_the_whole_step(num_ranks, max_tokens, max_sequences):
    samples = make_sequences(7)
    steps = [np.array([3, 0, 6]), np.array([1, 2, 4, 5])]
    shares = planner(num_ranks, max_tokens, max_sequences).steps(samples, steps)
    assert len(shares) == num_ranks
    for number, indices in enumerate(steps):
        parts, totals = [work.steps[number] for work in shares], [work.totals[number] for work in shares]
        trained = [id(sample) for micro_batches in parts for batch in micro_batches for sample in batch]
        assert sorted(trained) == sorted(id(samples[i]) for i in indices)
        assert {one.num_sequences for one in totals} == {len(indices)}
        assert {one.num_tokens for one in totals} == {sum(samples[i].num_trained for i in indices)}
        assert len({len(micro_batches) for micro_batches in parts}) == 1


def test_ranks_that_split_layers_get_the_same_micro_batches_of_one_ranks_tokens():
    sequences, batch = make_sequences(7), BatchConfig(train_max_tokens_per_gpu=20)
    plan = MicroBatchPlanner(4, batch, quadratic_cost=0.01, ranks_per_layer=2).plan(sequences)
    assert plan[0] == plan[1] != plan[2] == plan[3]
    assert plan[::2] == MicroBatchPlanner(2, batch, quadratic_cost=0.01).plan(sequences)


def test_prompts_go_to_the_engine_with_the_least_to_do():
    lengths = [5, 30, 7, 1, 12]  # expected tokens per response; prompts of one token, two samples each
    requests = [
        GenerationRequest([prompt], 10 * prompt + i, length) for prompt, length in enumerate(lengths) for i in (0, 1)
    ]
    # Costs 12, 62, 16, 4, 26: 62 to the first; 26, 16, 12 (54) and 4 to the second.
    assert balanced_shares(requests, 2) == [[2, 3], [0, 1, 4, 5, 6, 7, 8, 9]]


def test_a_question_about_another_picture_is_another_prompt():
    pictures = [picture_of_pixels(digest, np.zeros((4, 4, 3), np.uint8)) for digest in ("a", "b", "a")]
    placed = [(PlacedPicture(picture, 0, 2, token=7),) for picture in pictures]
    requests = [GenerationRequest([7, 7, 3], seed, 1, its) for seed, its in enumerate(placed)]
    assert balanced_shares(requests, 2) == [[0, 2], [1]]


def test_turns_go_to_the_engine_of_the_turns_before():
    first = [GenerationRequest([number], number, episode=10 + number) for number in range(5)]
    before = SharedBatch(dict(enumerate(first)), SamplingParams(1), [[0, 3], [], [1, 2, 4]])
    later = [GenerationRequest([number, 9], number, episode=10 + number) for number in (1, 3, 4)]
    shares = same_shares(later, before)
    assert shares == [[1], [], [0, 2]]
    assert same_shares(later[1:], SharedBatch(dict(enumerate(later)), SamplingParams(1), shares)) == [[0], [], [1]]
    strangers = [GenerationRequest([9], 0, episode=number) for number in (91, 92)]
    found = same_shares([*strangers, *later[1:]], SharedBatch(dict(enumerate(later)), SamplingParams(1), shares))
    assert found == [[0, 2], [1], [3]]  # a first turn goes to an engine with the fewest requests


def test_turns_go_to_the_engine_of_turns_that_joined_and_are_complete():
    first = [GenerationRequest([number], number, episode=number) for number in range(2)]
    before = SharedBatch(dict(enumerate(first)), SamplingParams(1), [[1], [0]])
    before.add([GenerationRequest([0, 9], 0, episode=0)])
    answer = Generation([9], [-0.1], "stop", 0)
    before.news(0, Arrivals([(0, answer)], is_last=True))
    before.news(1, Arrivals([(0, answer), (1, answer)], is_last=True))
    later = [GenerationRequest([number, 9, 9], number, episode=number) for number in range(2)]
    assert same_shares(later, before) == [[1], [0]]


@pytest.mark.parametrize("num_engines", [1, 2, 3, 7, 12])
def test_equal_prompts_are_spread_evenly_and_none_is_lost(num_engines):
    requests = [GenerationRequest([number // 2], number) for number in range(20)]
    shares = balanced_shares(requests, num_engines)
    assert len(shares) == num_engines
    assert sorted(number for share in shares for number in share) == list(range(20))
    assert max(map(len, shares)) - min(map(len, shares)) <= 2
    assert all(number ^ 1 in share for share in shares for number in share)  # samples of a prompt stay together
