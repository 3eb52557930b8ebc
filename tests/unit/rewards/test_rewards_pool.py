"""Worker pools: each item has a separate limit, and an item that hangs or kills its worker affects no other item."""

import asyncio
import os
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.backends.rollout.processes import process_tree
from rlhf_cli.rewards.file_feed import batch_of
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.workers.pool import Feed, WorkerPool

SOURCE = """
    import os, time

    def reward_func(queries, prompts, labels):
        number = int(queries[0])
        if labels[0]:
            open(labels[0], "a").write("x")
        if prompts[0] == "hang":
            time.sleep(600)
        if prompts[0] == "second try" and os.path.getsize(labels[0]) < 2:
            raise ValueError("not yet")
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
    file: dict[str, Any] = {"path": path, "name": None, "args": {}}
    return WorkerPool("rlhf_cli.rewards.workers.user_file:load", file, **({"limit": 20.0, "num_workers": 2} | settings))


def items(kinds: dict[int, str], count: int) -> list[dict]:
    return [item(kinds.get(i, ""), i) for i in range(count)]


def item(kind: str, number: int, note: Path | None = None) -> dict:
    """Make an item; the worker appends a character to the file `note`."""
    asked = ScoreRequest(str(number), kind, "", str(note) if note else None, 1, False, "g", 0, 1)
    return dict(batch_of([asked], None, needs=[]))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def values(pool: WorkerPool, kinds: dict[int, str], count: int) -> list:
    return [
        outcome.failure.reason if outcome.failure else outcome.value[0]["value"]
        for outcome in pool.map(items(kinds, count))
    ]


@pytest.mark.parametrize("chunk_size", [1, 16, 1000])
def test_only_the_items_that_hang_or_kill_fail(path: str, chunk_size: int) -> None:
    kinds = {3: "hang", 17: "die", 18: "die", 99: "hang", 50: "die alone"}
    with pool_of(path, limit=2.0, chunk_size=chunk_size) as pool:
        expected: list = [float(i) for i in range(100)]
        expected[3] = expected[99] = "did not answer within 2 s"
        expected[17] = expected[18] = "exited with code 7"
        expected[50] = "exited with code 8"
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
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # all threads have ended, but it is not reaped
        assert values(pool, {}, 2) == [0.0, 1.0]


def test_a_task_that_can_no_longer_be_loaded_fails_what_waits(path: str) -> None:
    with pool_of(path, num_workers=1) as pool:
        assert pool.start() is None
        Path(path).write_text("def reward_func(:")
        results = values(pool, {0: "die"}, 3)
        assert results[0] == "exited with code 7"
        assert all("is not valid Python" in result for result in results[1:])


def test_a_further_worker_that_cannot_load_the_task_leaves_it_to_those_that_have(tmp_path: Path, caplog) -> None:
    (tmp_path / "reward.py").write_text(
        "import os, time\n"
        f"os.mkdir({str(tmp_path / 'taken')!r})  # there is room for one\n"
        "def reward_func(queries, prompts, labels):\n    time.sleep(0.1)\n    return [float(queries[0])]\n"
    )
    with pool_of(str(tmp_path / "reward.py")) as pool:
        assert pool.start() is None
        assert values(pool, {}, 20) == [float(i) for i in range(20)]
        assert pool.num_workers == 1
    assert "another reward worker raised FileExistsError" in caplog.text


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


def test_workers_go_on_while_their_owner_does_something_else(path: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pool_of(path, num_workers=1, limit=60.0) as pool, pool.feed() as feed:
        assert feed.add(item("", i, note) for i in range(3)) == range(3)
        wait_until(lambda: note.exists() and len(note.read_text()) == 3)  # no call to the feed in between
        assert feed.add([item("", 3, note)]) == range(3, 4)
        assert [outcome.value[0]["value"] for outcome in asyncio.run(feed.finish())] == [0.0, 1.0, 2.0, 3.0]


def test_outcomes_are_reported_once_and_without_waiting_for_others(path: str) -> None:
    with pool_of(path, limit=60.0) as pool, pool.feed() as feed:
        assert feed.ready() == []
        feed.add([item("hang", 0), item("", 1), item("", 2)])
        seen: list[int] = []

        def two_are_seen() -> bool:
            seen.extend(number for number, _ in feed.ready())
            return len(seen) == 2

        wait_until(two_are_seen)
        assert sorted(seen) == [1, 2]


def test_what_is_left_of_a_feed_is_not_taken_for_the_next_ones(path: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pool_of(path, num_workers=1, limit=60.0) as pool:
        with pool.feed() as feed:
            feed.add([item("slow", 7, note), item("", 8)])
            wait_until(note.exists)
        assert not process_tree(os.getpid())
        assert values(pool, {}, 2) == [0.0, 1.0]


def test_an_item_that_failed_is_tried_again_as_often_as_allowed(path: str, tmp_path: Path) -> None:
    for retries, value in ((0, None), (1, 0.0)):
        note = tmp_path / f"note{retries}"
        with pool_of(path, retries=retries) as pool:
            (outcome,) = pool.map([item("second try", 0, note)])
        assert (outcome.value and outcome.value[0]["value"]) == value
        assert len(note.read_text()) == 1 + retries


def test_a_defect_in_the_thread_reaches_the_owner() -> None:
    with WorkerPool("json:loads", object(), limit=1.0) as pool, pool.feed() as feed:
        feed.add([1])
        with pytest.raises(TypeError, match="not JSON serializable"):
            asyncio.run(feed.finish())


def test_a_wait_that_is_cancelled_loses_no_outcome(path: str) -> None:
    async def impatient(feed: Feed) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(feed.finish(), 0.01)

    with pool_of(path, limit=60.0) as pool, pool.feed() as feed:
        feed.add([item("slow", 0), item("", 1)])
        asyncio.run(impatient(feed))
        assert [outcome.value[0]["value"] for outcome in asyncio.run(feed.finish())] == [0.0, 1.0]


def test_a_closed_pool_leaves_no_thread_and_may_be_closed_again(path: str) -> None:
    with pool_of(path) as pool:
        assert values(pool, {}, 1) == [0.0]
        pool.close()
    assert "reward workers" not in {thread.name for thread in threading.enumerate()}
