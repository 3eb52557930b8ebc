"""Requests that join a running batch, in the real transformers engine and in the process that runs an engine."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from test_rollout_transformers import REQUESTS, SAMPLING, SETTINGS, Engine, Shapes, collected

from rlhf_cli.backends.rollout.engine import Arrivals, RequestBatch
from rlhf_cli.backends.rollout.engine_host import EngineHost
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import UsageError


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    engine = Engine(tiny_model_dir)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def whole(engine):
    return dict(enumerate(engine.generate(REQUESTS, SAMPLING)))


def assert_same(found, whole):
    assert {number: one.token_ids for number, one in found.items()} == {n: one.token_ids for n, one in whole.items()}
    for number, one in found.items():
        assert one.logprobs == pytest.approx(whole[number].logprobs, abs=1e-4)


def test_all_that_joins_while_the_engine_works_on_something_else_is_generated_together(engine, whole):
    is_free = threading.Event()
    engine.engine._thread.submit(is_free.wait)
    engine.begin(REQUESTS[:6], SAMPLING)
    engine.add(REQUESTS[6:7])
    engine.add(REQUESTS[7:])
    with Shapes(engine.engine._model) as seen:
        is_free.set()
        assert collected(engine) == whole
    assert seen[:2] == [(3, 6), (18, 1)]


def test_added_requests_take_rows_of_the_batch_and_run_after_it_had_delivered_all(engine, whole, tiny_model_dir):
    small = Engine(tiny_model_dir)
    small.engine._settings = replace(SETTINGS, max_num_seqs=4)
    small.begin(REQUESTS[:9], SAMPLING)
    found = dict(small.collect().responses)
    small.add(REQUESTS[9:12])
    found |= collected(small)
    assert len(found) == 12
    small.add(REQUESTS[12:])
    found |= collected(small)
    assert_same(found, whole)
    small.shutdown()


def test_a_request_that_does_not_fit_raises_where_responses_are_collected(engine, whole):
    engine.begin(REQUESTS[:2], SAMPLING)
    engine.add([GenerationRequest([5] * 50, 0)])
    with pytest.raises(UsageError, match="prompt 0 has 50 tokens"):
        collected(engine)
    assert dict(enumerate(engine.generate(REQUESTS, SAMPLING))) == whole


def test_a_canceled_collect_leaves_the_responses_to_the_next(engine, whole):
    async def canceled_once() -> dict[int, Generation]:
        engine_is_free = threading.Event()
        inner = engine.engine
        inner._thread.submit(engine_is_free.wait)
        await inner.begin(REQUESTS, SAMPLING)
        collecting = asyncio.create_task(inner.collect())
        await asyncio.sleep(0)
        engine_is_free.set()
        # Everything is delivered while the loop is blocked, so the cancellation comes with the responses.
        inner._thread.submit(int).result()
        collecting.cancel()
        await asyncio.wait({collecting})
        assert collecting.cancelled()
        arrivals = await inner.collect()
        assert arrivals.is_last
        return dict(arrivals.responses)

    assert engine.runner.run(canceled_once()) == whole


def test_a_closed_loop_ends_the_work_on_its_batch(engine, whole):
    inner, engine_is_free = engine.engine, threading.Event()
    inner._thread.submit(engine_is_free.wait)
    asyncio.run(inner.begin([*REQUESTS[:1], *(replace(one, max_new_tokens=2) for one in REQUESTS[1:])], SAMPLING))
    with Shapes(inner._model) as seen:
        engine_is_free.set()
        inner._thread.submit(int).result()
    # Prefill, and one step to the second token, with which the first responses are finished.
    assert len(seen) == 2
    assert dict(enumerate(engine.generate(REQUESTS, SAMPLING))) == whole


class ListingEngine:
    """Records its requests and completes each at once."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.limits: list[int] = []
        self.num_told = 0

    async def begin(self, requests, sampling):
        self.asked, self.num_told = [*requests], 0

    async def add(self, requests):
        if not all(requests):
            raise UsageError("a request is empty")
        self.asked += requests

    async def cut(self, max_tokens):
        self.limits.append(max_tokens)

    async def collect(self):
        first, self.num_told = self.num_told, len(self.asked)
        return Arrivals(list(enumerate(self.asked))[first:], is_last=True)


def test_calls_about_a_batch_that_overtake_each_other_wait_for_the_requests_before_theirs():
    async def scenario() -> None:
        engine: Any = ListingEngine()
        host = EngineHost(engine)
        late = asyncio.create_task(host.add(1, 5, ["f"]))  # type: ignore[list-item]
        early = asyncio.create_task(host.add(1, 3, ["d", "e"]))  # type: ignore[list-item]
        listening = asyncio.create_task(host.collect(1, 6))
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.asked == []
        first = await host.begin(1, ["a", "b", "c"], SamplingParams(1), None)  # type: ignore[list-item]
        await asyncio.gather(late, early)
        assert engine.asked == ["a", "b", "c", "d", "e", "f"]
        assert [*first.responses, *(await listening).responses] == list(enumerate("abcdef"))

    asyncio.run(scenario())


def test_calls_about_an_earlier_batch_change_nothing_in_the_present_one():
    async def scenario() -> None:
        engine: Any = ListingEngine()
        host = EngineHost(engine)
        await host.begin(1, ["a"], SamplingParams(1), None)  # type: ignore[list-item]
        await engine.begin(["x"], SamplingParams(1))
        await host._note(2, 1)
        await host.add(1, 1, ["b"])  # type: ignore[list-item]
        await host.cut(1, 0)
        assert engine.limits == []
        await host.cut(2, 7)
        assert engine.limits == [7]
        assert await host.collect(1, 2) == Arrivals([], is_last=True)
        assert (await host.collect(2, 1)).responses == [(0, "x")]

    asyncio.run(scenario())


def test_an_engine_that_refuses_to_be_joined_raises_where_responses_are_collected():
    async def scenario() -> None:
        host = EngineHost(ListingEngine())  # type: ignore[arg-type]
        await host.begin(1, ["a"], SamplingParams(1), None)  # type: ignore[list-item]
        await host.add(1, 1, [""])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="a request is empty"):
            await host.collect(1, 2)
        await host.begin(2, ["a"], SamplingParams(1), None)  # type: ignore[list-item]
        assert (await host.collect(2, 1)).is_last

    asyncio.run(scenario())


class TimedEngine:
    """Completes response `n` at `times[n]` seconds after `begin`."""

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.batch = RequestBatch(9)

    async def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self.batch.open(len(requests))
        loop = asyncio.get_running_loop()
        for number, seconds in enumerate(self.times):
            loop.call_later(seconds, self.batch.add, number, Generation([number], [-0.1], "stop", 0))
        loop.call_later(max(self.times), self.batch.close)

    async def collect(self) -> Arrivals:
        return await self.batch.collect()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, [[0], [1], [2], [3]]), (0.25, [[0, 1, 2], [3]]), (5.0, [[0, 1, 2, 3]])],
)
def test_responses_that_complete_soon_after_each_other_arrive_together(seconds, expected):
    """The last call returns as soon as the batch is complete, however long it could wait."""
    host = EngineHost(TimedEngine([0.0, 0.1, 0.15, 0.5]), collect_seconds=seconds)  # type: ignore[arg-type]

    async def collect_all() -> list[Arrivals]:
        found = [await host.begin(1, REQUESTS[:4], SAMPLING, None)]
        while not found[-1].is_last:
            found.append(await host.collect(1, 4))
        return found

    begin = time.monotonic()
    found = asyncio.run(collect_all())
    assert [[number for number, _ in arrivals.responses] for arrivals in found] == expected
    assert time.monotonic() - begin < 3
