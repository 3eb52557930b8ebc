"""The loop of `rlhf gkd` with fakes: on-policy and data set iterations, and its settings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from online_fakes import FakeEngines, FakeModel, FakeScorer, FakeTracker
from online_settings import online_settings, resolve
from test_online_repeats import PROMPTS
from tiny_training import make_sequences

from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.sampling import StepBatches
from rlhf_cli.errors import UsageError
from rlhf_cli.trainers.online.distilling import OWN_RESPONSES, Mixture, train_student
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.loop import OnlineHooks
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.state import LoopState, first_state

ROWS = make_sequences(10)
SMALL = {"rollout_batch_size": "2", "n_samples_per_prompt": "2", "train_batch_size": "4", "max_new_tokens": "4"}


class Learner(FakeModel):
    """A student that records its training data."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__("student", journal)
        self.learned: list[list[TokenSequence]] = []

    def learn(self, sequences: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        self._note("learn")
        self.learned.append([sequences[i] for step in steps for i in sorted(step)])
        return [{"loss": 1.0} for _ in steps]


class FakeRun:
    """Iterations with fakes and `ROWS` as the data set."""

    def __init__(self, lmbda: float, *, seed: int = 1, **given: Any) -> None:
        self.config: GKDConfig = resolve("gkd", teacher_pretrain="t", seed=str(seed), **SMALL | given)
        self.journal: list[str] = []
        self.student, self.engines, self.tracker = Learner(self.journal), FakeEngines(self.journal), FakeTracker()
        self.saved: list[LoopState] = []
        self.mixture = Mixture(lmbda, ROWS, 4, seed)

    def __call__(self, iterations: int, *, state: LoopState | None = None) -> "FakeRun":
        scorer = FakeScorer(self.journal, fails=lambda index: False)
        roles = Roles(actor=self.student, engines=self.engines, scorer=scorer)
        train_student(
            roles,
            self.mixture,
            RolloutSource(
                self.engines,
                scorer,
                online_settings(self.config, "gkd"),
                PROMPTS,
                lambda token_ids: "".join(map(str, token_ids)),
                self.tracker.message,
            ),
            state=state or first_state(self.config.policy),
            total_iterations=iterations,
            save_steps=1,
            hooks=OnlineHooks(self.tracker, self.saved.append, lambda: False),
        )
        return self

    @property
    def own(self) -> list[float]:
        return [metrics[OWN_RESPONSES] for _, metrics in self.tracker.logged]

    @property
    def tokens(self) -> list[list[list[int]]]:
        return [[sequence.token_ids.tolist() for sequence in learned] for learned in self.student.learned]


def test_the_share_of_iterations_with_own_responses_is_lmbda():
    for lmbda in (0.0, 0.25, 0.8, 1.0):
        drawn = [Mixture(lmbda, ROWS, 4, seed=3).is_own(iteration) for iteration in range(4000)]
        assert np.mean(drawn) == pytest.approx(lmbda, abs=0.025)


def test_draws_repeat_with_the_seed_and_differ_with_another():
    first, second, other = ([Mixture(0.5, ROWS, 4, seed).is_own(i) for i in range(64)] for seed in (7, 7, 8))
    assert first == second
    assert first != other


def test_fixed_rows_come_in_the_order_of_the_offline_command():
    mixture = Mixture(0.0, ROWS, 4, seed=5)
    expected = StepBatches(len(ROWS), batch_size=4, epochs=2, seed=5)
    found = [mixture.fixed_batch(iteration) for iteration in range(6)]
    assert [len(batch) for batch in found] == [4, 4, 2, 4, 4, 2]
    for batch, indices in zip(found, expected, strict=True):
        assert all(one is ROWS[index] for one, index in zip(batch, indices, strict=True))


def test_an_iteration_learns_on_own_responses_or_on_rows_and_both_push_weights():
    run = FakeRun(0.5, num_episodes="4")(8)
    assert set(run.own) == {0.0, 1.0}
    kinds = [any(one is row for one in learned for row in ROWS) for learned in run.student.learned]
    assert [not kind for kind in kinds] == run.own
    assert run.journal.count("engines.generate") == sum(run.own)
    assert [call for call in run.journal if "receive" in call] == [f"engines.receive_weights {i}" for i in range(1, 9)]
    assert [step for step, _ in run.tracker.rows] == [
        step for step, metrics in run.tracker.logged if metrics[OWN_RESPONSES]
    ]


def test_engines_leave_the_accelerators_before_an_iteration_on_rows():
    assert FakeRun(0.0)(1).journal == [
        "engines.sleep",
        "student.learn",
        "engines.receive_weights 1",
        "student.sleep",
    ]


def test_exactly_the_sampled_tokens_are_learned_on():
    run = FakeRun(1.0)(1)
    for sequence, request in zip(run.student.learned[0], run.engines.requests[0], strict=False):
        assert sequence.num_trained == len(sequence.token_ids) - len(request.prompt_ids)
    asked = [[*request.prompt_ids, *run.engines._answer(request).token_ids] for request in run.engines.requests[0]]
    assert sorted(run.tokens[0]) == sorted(asked)


def test_a_continued_loop_learns_on_what_it_would_have():
    whole = FakeRun(0.5, num_episodes="4")(8)
    first = FakeRun(0.5, num_episodes="4")(5)
    rest = FakeRun(0.5, num_episodes="4")(8, state=first.saved[2])
    assert rest.tokens == whole.tokens[3:]
    assert rest.saved[-1] == whole.saved[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lmbda": "1", "dataset": "d"}, "dataset applies to dataset responses, which are not used with lmbda 1"),
        ({"prompt_template": "t"}, "prompt_template renders only prompts, but lmbda below 1 also reads"),
        ({"format_prompt": "t"}, "format_prompt renders only prompts, but lmbda below 1 also reads"),
        ({"lmbda": "1.5"}, "lmbda 1.5: must be a number from 0 to 1"),
    ],
)
def test_settings_of_rows_that_are_not_read_are_refused(given, message):
    with pytest.raises(UsageError, match=message):
        resolve("gkd", teacher_pretrain="t", **given)
