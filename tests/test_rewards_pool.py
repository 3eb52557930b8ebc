"""Worker pools: each item has its own limit, and one that hangs or kills its worker takes no other item along."""

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_cli.backends.rollout_processes import process_tree
from rlhf_cli.rewards.pool import WorkerPool

SOURCE = """
    import os, time

    def reward_func(queries, prompts, labels):
        number = int(queries[0])
        if prompts[0] == "hang":
            time.sleep(600)
        if prompts[0] == "slow":
            time.sleep(0.4)
        if prompts[0] == "who":
            time.sleep(0.4)
            return [os.getpid()]
        if prompts[0] == "die":
            os._exit(7)
        if prompts[0] == "die alone":  # the child keeps the worker's socket open
            if os.fork() == 0:
                time.sleep(600)
            os._exit(8)
        return [number]
"""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "reward.py").write_text(textwrap.dedent(SOURCE))
    yield str(tmp_path / "reward.py")
    assert not process_tree(os.getpid())


def pool_of(path: str, **settings) -> WorkerPool:
    return WorkerPool("rlhf_cli.rewards.user_file:load", path, **({"limit": 20.0, "num_workers": 2} | settings))


def items(kinds: dict[int, str], count: int) -> list[dict]:
    return [{"queries": [str(i)], "prompts": [kinds.get(i, "")], "labels": [None]} for i in range(count)]


def values(pool: WorkerPool, kinds: dict[int, str], count: int) -> list:
    return [
        outcome.failure.reason if outcome.failure else outcome.value[0][0] for outcome in pool.map(items(kinds, count))
    ]


@pytest.mark.parametrize("chunk_size", [1, 16, 1000])
def test_only_the_items_that_hang_or_kill_fail(path: str, chunk_size: int) -> None:
    kinds = {3: "hang", 17: "die", 18: "die", 99: "hang", 50: "die alone"}
    with pool_of(path, limit=2.0, chunk_size=chunk_size) as pool:
        expected: list = [float(i) for i in range(100)]
        expected[3] = expected[99] = "did not answer within 2 s"
        expected[17] = expected[18] = "ended its process with exit code 7"
        expected[50] = "ended its process with exit code 8"
        assert values(pool, kinds, 100) == expected


def test_the_limit_is_for_an_item_not_for_a_chunk(path: str) -> None:
    with pool_of(path, limit=1.5, chunk_size=100, num_workers=1) as pool:
        assert values(pool, dict.fromkeys(range(5), "slow"), 5) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_slow_items_are_spread_over_workers(path: str) -> None:
    with pool_of(path, num_workers=4) as pool:
        values(pool, dict.fromkeys(range(4), "slow"), 4)
        assert len(set(values(pool, dict.fromkeys(range(8), "who"), 8))) == 4


def test_a_worker_that_died_between_calls_costs_no_item(path: str) -> None:
    with pool_of(path, num_workers=1) as pool:
        assert values(pool, {}, 1) == [0.0]
        child = process_tree(os.getpid())[0]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # all its threads have ended, it is not reaped
        assert values(pool, {}, 2) == [0.0, 1.0]


def test_a_task_that_can_no_longer_be_loaded_fails_what_waits(path: str) -> None:
    with pool_of(path, num_workers=1) as pool:
        assert pool.start() is None
        Path(path).write_text("def reward_func(:")
        results = values(pool, {0: "die"}, 3)
        assert results[0] == "ended its process with exit code 7"
        assert all("is not valid Python" in result for result in results[1:])


def test_ten_thousand_items_keep_their_order(path: str) -> None:
    with pool_of(path, chunk_size=64) as pool:
        assert values(pool, {}, 10_000) == [float(i) for i in range(10_000)]


def test_answers_of_an_interrupted_call_are_not_taken_for_those_of_the_next(path: str) -> None:
    with pool_of(path, num_workers=1) as pool:
        pool.start()
        unserialisable = [*items({}, 1), {"queries": object()}]
        with pytest.raises(TypeError):
            pool.map(unserialisable)
        assert values(pool, {}, 1) == [0.0]
