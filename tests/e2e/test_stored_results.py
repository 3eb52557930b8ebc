"""Results of ranks stay in Ray's object store, and an iteration computes the same as with arrays in the driver."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from online_fakes import BATCH, Run
from online_settings import resolve

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.backends.roles.groups import ActorRole, FrozenPolicyRole, store_column, store_sequences
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.roles.worker import RayWorker
from rlhf_cli.backends.roles.worker_group import WorkerGroup
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.stored_arrays import StoredArray, StoredChunk
from rlhf_cli.errors import ProcessDied
from rlhf_cli.trainers.online.interfaces import Roles

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_RANKS = 2
STORE_BYTES = 80 << 20
IN_LOSS = resolve("grpo", init_kl_coef=0.1).policy
IN_REWARD = ActorCriticPolicyConfig(init_kl_coef=0.1, use_kl_loss=False)


class Rank:
    """A rank whose log-probs depend on the tokens, and whose update returns weighted sums of the columns."""

    def __init__(self, level: float) -> None:
        self.level = level

    def pid(self) -> int:
        return os.getpid()

    def logprobs(self, micro_batches: list[list[TokenSequence]]) -> list[np.ndarray]:
        return [
            np.concatenate([np.zeros(0, np.float32), *(self._logprobs(one) for one in members)])
            for members in micro_batches
        ]

    def _logprobs(self, sequence: TokenSequence) -> np.ndarray:
        return (-np.sqrt(1 + sequence.token_ids[sequence.loss_mask]) * self.level).astype(np.float32)

    def update(self, work: RankWork, on_policy: bool, weights: object, *, watch: None) -> list[dict[str, float]]:
        moments = dict.fromkeys((f"moment/{name}_mean" for name in ("x", "y", "xx", "yy", "xy")), 0.5)
        return [
            {"entropy": 0.1} | moments | self._sums([one for members in step for one in members]) for step in work.steps
        ]

    def _sums(self, sequences: list[TokenSequence]) -> dict[str, float]:
        names = sequences[0].columns
        return {
            f"sum_{name}": float(sum((place + 1) * one.columns[name].sum() for place, one in enumerate(sequences)))
            for name in names
        }


class LocalGroup:
    """Ranks in this process."""

    def __init__(self, level: float) -> None:
        self._ranks = [Rank(level) for _ in range(NUM_RANKS)]

    def all_each(self, call: Callable[..., Any], work: Sequence[RankWork]) -> list[Any]:
        return [call(rank, share) for rank, share in zip(self._ranks, work, strict=True)]

    all_stored = all_each


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
        # Workers must be able to import this file.
        patch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))
        # Without room on the disk, objects that are never freed end the test.
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _system_config={"automatic_object_spilling_enabled": False},
        )
        yield
        ray.shutdown()


def started(role: str, level: float, folder: Path) -> WorkerGroup[Any]:
    logs = [folder / f"{role}-{rank}.log" for rank in range(NUM_RANKS)]
    workers = [ray.remote(RayWorker).options(num_cpus=0).remote(environment={}, log_file=log) for log in logs]
    ray.get([worker.build.remote({}, f"{__name__}:Rank", level) for worker in workers])
    return WorkerGroup(role, workers, folder)


@pytest.fixture(scope="module")
def groups(cluster, tmp_path_factory) -> list[WorkerGroup[Any]]:
    folder = tmp_path_factory.mktemp("logs")
    return [started("actor", 1.0, folder), started("ref", 1.25, folder)]


def planner() -> MicroBatchPlanner:
    return MicroBatchPlanner(NUM_RANKS, BatchConfig(train_max_tokens_per_gpu=1 << 21), 1e-5)


class RankedRun(Run):
    """A run with such ranks for actor and reference."""

    def __init__(self, actor: Any, reference: Any, **more: Any) -> None:
        super().__init__(batch=BatchConfig(train_batch_size=BATCH), **more)
        self._ranked = ActorRole(actor, planner(), takes_turns=False)
        self._ref = FrozenPolicyRole(reference, planner(), takes_turns=False)
        # Engine pushes and sleep concern no array.
        self._ranked.sleep = self._ranked.wake_weights = lambda: None  # type: ignore[method-assign]
        self._stores: dict[str, Any] = {}
        if isinstance(actor, WorkerGroup):
            self._stores = {"store": store_sequences, "store_column": store_column, "by_sample": actor.by_sample}

    def roles(self) -> Roles:
        return replace(super().roles(), actor=self._ranked, frozen_policies={"ref": self._ref}, **self._stores)


def assert_same(run: RankedRun, local: RankedRun) -> None:
    for each in (run, local):
        each(total_iterations=3)
    assert run.tracker.logged == local.tracker.logged
    assert run.tracker.rows == local.tracker.rows
    rows = [row for _, rows in run.tracker.rows for row in rows]
    assert all(None not in (row["old_logprob"], row["ref_logprob"], row["ratio"], row["kl"]) for row in rows)
    assert {"sum_old_logprobs", "sum_rollout_logprobs", "sum_advantages"} <= run.tracker.logged[0][1].keys()


def test_grpo_reads_no_result_in_the_driver_and_frees_all_after_an_iteration(groups, monkeypatch):
    run = RankedRun(*groups, algorithm="grpo", policy=IN_LOSS)
    local = RankedRun(LocalGroup(1.0), LocalGroup(1.25), algorithm="grpo", policy=IN_LOSS)
    kept: list[int] = []
    run.evaluate = lambda iteration, is_last: kept.append(sum(isinstance(one, StoredChunk) for one in gc.get_objects()))

    def fail(chunk: StoredChunk) -> np.ndarray:
        raise AssertionError("the driver reads values")

    monkeypatch.setattr(StoredChunk, "values", property(fail))
    assert_same(run, local)
    assert "sum_ref_logprobs" in run.tracker.logged[0][1]
    assert kept == [0] * 4


def test_a_kl_penalty_in_the_reward_reads_the_results(groups):
    run = RankedRun(*groups, policy=IN_REWARD)
    assert_same(run, RankedRun(LocalGroup(1.0), LocalGroup(1.25), policy=IN_REWARD))
    assert run.critic.updates


def test_the_store_frees_results_that_nobody_refers_to(groups):
    mask = np.arange(1_000_000) > 0
    sequences = [TokenSequence(np.full(mask.size, level, np.int32), mask) for level in range(2)]
    role = ActorRole(groups[0], planner(), takes_turns=False)
    weights = LossWeights({}, None)  # type: ignore[arg-type]
    num_rounds = 12
    assert num_rounds * 6 * mask.size * 4 > 3 * STORE_BYTES
    for _ in range(num_rounds):
        stored = store_sequences(sequences)
        results = role.logprobs(stored)
        engine = store_column([np.zeros(one.num_trained, np.float32) for one in sequences])
        samples = [
            replace(one, stored=one.stored | {"old_logprobs": old, "rollout_logprobs": own})
            for one, old, own in zip(stored, results, engine, strict=True)
            if isinstance(old, StoredArray) and isinstance(own, StoredArray)
        ]
        role.update(samples, [np.arange(2)], on_policy=False, weights=weights)
    assert [float(one[0]) for one in results] == [-1.0, pytest.approx(-(2**0.5))]


@pytest.mark.slow
def test_a_result_of_a_dead_rank_ends_the_run_with_its_name(cluster, tmp_path):
    group = started("teacher", 1.0, tmp_path)
    mask = np.arange(5) > 0
    sequences = [TokenSequence(np.arange(5, dtype=np.int32), mask)] * NUM_RANKS
    results = FrozenPolicyRole(group, planner(), takes_turns=False).logprobs(sequences)
    for pid in group.all(lambda rank: rank.pid()):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match=r"teacher rank \d died \("):
        group.all(lambda rank: rank.pid())
    with pytest.raises(ProcessDied, match=r"teacher rank \d died \(.*its log is"):
        read_repeatedly(results[0])


def read_repeatedly(result: Any) -> None:
    # Until Ray has noticed that nobody owns the object, it can still be read.
    for _ in range(300):
        time.sleep(0.1)
        result.chunk.read(result.chunk.reference)
