"""Restarts after a process has died: their number, their state, and failures that are not retried."""

import pickle

import pytest

from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.runs.online.restarts import Restarts
from rlhf_cli.trainers.offline.loop import Finished


class Attempts:
    """Attempts whose ends are given by the test."""

    def __init__(self, *outcomes: Exception | Finished) -> None:
        self.outcomes = list(outcomes)
        self.continues: list[bool] = []
        self.said: list[str] = []

    def __call__(self, continues: bool) -> Finished:
        self.continues.append(continues)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run(self, *, max_restarts: int, stopped: bool = False, saved_after: int = 0) -> Finished:
        restarts = Restarts(
            max_restarts,
            should_stop=lambda: stopped,
            has_checkpoint=lambda: len(self.continues) > saved_after,
            say=self.said.append,
        )
        while True:
            with restarts.caught():
                return self(restarts.count > 0)


DONE = Finished(4, interrupted=False)
DEATH = ProcessDied("actor rank 0 died")


def test_every_attempt_after_the_first_continues_and_is_announced():
    attempts = Attempts(DEATH, DEATH, DONE)
    assert attempts.run(max_restarts=2) == DONE
    assert attempts.continues == [False, True, True]
    assert attempts.said == [
        f"actor rank 0 died; going on from the last checkpoint (restart {number} of 2)" for number in (1, 2)
    ]


def test_a_death_before_the_first_checkpoint_begins_anew_and_says_so():
    attempts = Attempts(DEATH, DEATH, DONE)
    assert attempts.run(max_restarts=2, saved_after=1) == DONE
    assert attempts.said == [
        "actor rank 0 died; no checkpoint yet, beginning anew (restart 1 of 2)",
        "actor rank 0 died; going on from the last checkpoint (restart 2 of 2)",
    ]


def test_one_death_more_than_allowed_ends_the_run_and_says_how_to_continue():
    attempts = Attempts(DEATH, DEATH, DONE)
    with pytest.raises(ProcessDied, match="actor rank 0 died; run the same command with --load_checkpoint"):
        attempts.run(max_restarts=1)
    assert attempts.continues == [False, True]


@pytest.mark.parametrize(
    ("error", "stopped"), [(RunError("too many rewards failed"), False), (ValueError("defect"), False), (DEATH, True)]
)
def test_what_would_come_again_or_was_asked_for_is_not_tried_again(error, stopped):
    attempts = Attempts(error, DONE)
    with pytest.raises(type(error)):
        attempts.run(max_restarts=3, stopped=stopped)
    assert attempts.continues == [False]


def test_a_death_reported_by_another_process_is_worded_once():
    assert str(pickle.loads(pickle.dumps(DEATH))) == str(DEATH)
