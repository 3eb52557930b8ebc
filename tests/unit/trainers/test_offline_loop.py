"""The offline loop with a fake engine: the items of each step, and when it saves, evaluates and logs."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.errors import RunError
from rlhf_cli.trainers.offline.loop import Finished, OfflineHooks, Schedule, Share, evaluate, train

NUM_ITEMS, BATCH, EPOCHS = 10, 4, 3
STEPS = 9  # three per epoch, the last with two items


class FakeItems:
    """Item i has i + 1 tokens, one of them trained; a micro-batch is a list of items."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        self.lengths = np.arange(1, num_items + 1)
        self.num_trained = np.ones(num_items, dtype=np.int64)
        self.patches: np.ndarray | None = None

    def collate(self, indices: Sequence[int]) -> list[int]:
        return list(indices)


class FakeEngine:
    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.steps: list[list[list[int]]] = []
        self.totals: list[StepTotals] = []
        self.skipped: list[int] = []  # numbers of the skipped steps
        self.token_limit: int | None = None

    def train_step(self, micro_batches: Sequence[Any], compute_loss: Any, *, smaller: Any) -> dict[str, float]:
        self.journal.append("train")
        self.steps.append(list(micro_batches))
        last_good = max(step for step in range(len(self.steps) + 1) if step not in self.skipped)
        in_a_row = {"skipped_in_a_row": float(len(self.steps) - last_good)}
        return self._sum(micro_batches, compute_loss) | in_a_row

    def evaluate(self, micro_batches: Iterable[Any], compute_loss: Any) -> dict[str, float]:
        self.journal.append("evaluate")
        return self._sum(micro_batches, compute_loss)

    def _sum(self, micro_batches: Iterable[Any], compute_loss: Any) -> dict[str, float]:
        return {"loss": sum(float(compute_loss(nn.Identity(), batch)[0]) for batch in micro_batches)}


def mean_index(model: nn.Module, micro_batch: list[int], totals: StepTotals) -> Any:
    """Return the mean number of the step's items."""
    return torch.tensor(sum(micro_batch) / totals.num_sequences), {}


class FakeTracker:
    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.logged: list[tuple[int, dict[str, float], set[str]]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float], phases: dict[str, float]) -> None:
        self.journal.append(f"log {step}")
        self.logged.append((step, metrics, set(phases)))

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.evaluations.append((step, metrics))

    def phase(self, name: str | None) -> None:
        pass


class Run:
    def __init__(self, *, stop_after: int | None = None, rank: int = 0, num_ranks: int = 1, **batch: Any) -> None:
        self.journal: list[str] = []
        self.engine, self.tracker = FakeEngine(self.journal), FakeTracker(self.journal)
        self.stop_after = stop_after
        settings = {"train_batch_size": BATCH, "max_epochs": EPOCHS, "train_max_tokens_per_gpu": 12} | batch
        self.share = Share(rank, num_ranks, BatchConfig(**settings), quadratic_cost=0.0)

    def __call__(
        self, *, start: int = 0, total: int = STEPS, save: int = -1, evaluate: int = -1, eval_items: int = 0
    ) -> Finished:
        return train(
            self.engine,
            mean_index,
            data=FakeItems(),
            eval_data=FakeItems(eval_items) if eval_items else None,
            share=self.share,
            schedule=Schedule(start, total, save_steps=save, eval_steps=evaluate, max_skipped_steps=2),
            hooks=OfflineHooks(
                self.tracker,
                lambda step: self.journal.append(f"save {step}"),
                lambda: self.stop_after is not None and len(self.engine.steps) >= self.stop_after,
            ),
        )

    @property
    def items_by_step(self) -> list[list[int]]:
        return [sorted(item for micro_batch in step for item in micro_batch) for step in self.engine.steps]


NO_HOOKS = OfflineHooks(FakeTracker([]), lambda step: None, lambda: False)


def saves(run: Run) -> list[int]:
    return [int(entry.split()[1]) for entry in run.journal if entry.startswith("save")]


def test_every_item_is_trained_once_an_epoch():
    run = Run()
    assert run() == Finished(STEPS, interrupted=False)
    assert [len(items) for items in run.items_by_step] == [4, 4, 2] * EPOCHS
    epochs = [run.items_by_step[start : start + 3] for start in (0, 3, 6)]
    assert all(sorted([*a, *b, *c]) == list(range(NUM_ITEMS)) for a, b, c in epochs)
    assert epochs[0] != epochs[1]


def test_micro_batches_keep_to_the_bounds():
    for step in (batch for run in [run_once()] for batch in run.engine.steps):
        assert all(sum(item + 1 for item in micro_batch) <= 12 for micro_batch in step)
    assert {len(micro_batch) for step in run_once(micro_train_batch_size=1).engine.steps for micro_batch in step} == {1}


def run_once(**options: Any) -> Run:
    run = Run(**options)
    run()
    return run


def test_the_loss_is_the_mean_over_the_step_however_it_is_cut_up():
    whole, single = run_once(train_max_tokens_per_gpu=100), run_once(micro_train_batch_size=1)
    for (step, metrics, phases), (_, same, _), items in zip(
        whole.tracker.logged, single.tracker.logged, whole.items_by_step, strict=True
    ):
        assert metrics["loss"] == pytest.approx(float(np.mean(items)))
        assert same["loss"] == pytest.approx(metrics["loss"])
        assert (metrics["num_tokens"], metrics["num_sequences"]) == (len(items), len(items))
        assert phases == {"data", "train"}
        assert step > 0


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_share_every_step_and_take_as_many_micro_batches(num_ranks):
    alone = run_once()
    ranks = [run_once(rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for step, expected in enumerate(alone.items_by_step):
        assert sorted(item for run in ranks for item in run.items_by_step[step]) == expected
        assert len({len(run.engine.steps[step]) for run in ranks}) == 1
        parts = [run.tracker.logged[step][1]["loss"] for run in ranks]
        assert sum(parts) == pytest.approx(alone.tracker.logged[step][1]["loss"])


@pytest.mark.parametrize("start", [1, 3, 5, 8])
def test_a_resumed_run_trains_the_same_steps(start):
    whole, rest = run_once(), Run()
    rest(start=start)
    assert rest.engine.steps == whole.engine.steps[start:]
    assert rest.tracker.logged == whole.tracker.logged[start:]


def test_a_finished_run_that_is_resumed_does_nothing():
    run = Run()
    assert run(start=STEPS, save=1) == Finished(STEPS, interrupted=False)
    assert run.journal == []


def test_a_finished_run_that_is_resumed_is_evaluated_again_for_what_is_saved_with_the_model():
    whole, again = Run(), Run()
    ended = whole(eval_items=3)
    assert again(start=STEPS, save=1, eval_items=3) == ended
    assert ended.evaluated == {"loss": 1.0}  # the mean of 0, 1 and 2
    assert (again.journal, again.tracker.evaluations) == (["evaluate"], [])


@pytest.mark.parametrize(("every", "saved"), [(-1, []), (4, [4, 8, 9]), (3, [3, 6, 9]), (100, [9])])
def test_checkpoints_are_written_when_due_and_at_the_end(every, saved):
    run = Run()
    run(save=every)
    assert saves(run) == saved


def test_an_accuracy_is_evaluated_with_its_interval():
    class Judged(FakeEngine):
        def evaluate(self, micro_batches: Iterable[Any], compute_loss: Any) -> dict[str, float]:
            return {"loss": 0.6, "accuracy": 0.5}

    found = evaluate(Judged([]), mean_index, data=FakeItems(10), share=Run().share, hooks=NO_HOOKS)
    # Wilson: (0.5 + 1.92 / 10 +- 1.96 sqrt(0.25 / 10 + 3.84 / 400)) / (1 + 3.84 / 10)
    assert found == {"loss": 0.6, "accuracy": 0.5} | {
        "accuracy_low": pytest.approx(0.2366, abs=1e-4),
        "accuracy_high": pytest.approx(0.7634, abs=1e-4),
    }


@pytest.mark.parametrize(("every", "evaluated"), [(-1, [9]), (4, [4, 8, 9]), (9, [9])])
def test_evaluation_is_when_due_and_at_the_end(every, evaluated):
    run = Run()
    run(evaluate=every, eval_items=5)
    assert [step for step, _ in run.tracker.evaluations] == evaluated
    assert all(metrics["loss"] == pytest.approx(2.0) for _, metrics in run.tracker.evaluations)  # of 0, 1, 2, 3, 4


def test_everything_of_a_step_is_reported_before_its_checkpoint():
    run = Run()
    run(total=2, save=1, evaluate=1, eval_items=3)
    assert run.journal == ["train", "log 1", "evaluate", "save 1", "train", "log 2", "evaluate", "save 2"]


def test_a_stop_saves_once_after_the_step_and_ends():
    run = Run(stop_after=4)
    assert run(save=2) == Finished(4, interrupted=True)
    assert saves(run) == [2, 4]
    assert run.journal[-3:] == ["train", "log 4", "save 4"]


def test_a_stop_is_saved_also_where_no_checkpoints_are_asked_for():
    run = Run(stop_after=2)
    assert run() == Finished(2, interrupted=True)
    assert saves(run) == [2]


def test_a_stop_in_the_last_step_is_the_end():
    run = Run(stop_after=STEPS)
    assert run() == Finished(STEPS, interrupted=False)
    assert saves(run) == []


def test_too_many_skipped_steps_in_a_row_end_the_run_and_are_saved_as_steps():
    run = Run()
    run.engine.skipped = [1, 2, 4, 5, 6, 7]
    message = r"in 3 optimizer steps in a row \(--max_skipped_steps 2\).* step 6 is saved"
    with pytest.raises(RunError, match=message):
        run(eval_items=3, evaluate=1)
    assert run.journal[-3:] == ["train", "log 6", "save 6"]
    assert saves(run) == [6]
