"""An event loop in a separate thread: its tasks, errors and shutdown."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from rlhf_cli.event_loop import LoopThread

NAME = "a loop of a test"


async def nothing() -> None:
    """Do nothing."""


def is_running() -> bool:
    return NAME in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    started = LoopThread(NAME)
    yield started
    started.end(nothing)


def test_work_runs_in_the_thread_and_its_result_comes_back(thread):
    async def where() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert thread.run(where()) == NAME


def test_functions_are_called_in_the_loop_in_their_order(thread):
    seen: list[tuple[str, int]] = []

    def see(number: int) -> None:
        asyncio.get_running_loop()  # raises outside the loop
        seen.append((threading.current_thread().name, number))

    thread.call_soon(see, 1)
    thread.call_soon(see, 2)
    thread.run(nothing())
    assert seen == [(NAME, 1), (NAME, 2)]


def test_an_error_of_the_work_is_raised_and_the_loop_goes_on(thread):
    async def fail() -> None:
        raise ValueError("a mood")

    with pytest.raises(ValueError, match="a mood"):
        thread.run(fail())
    thread.run(nothing())


def test_work_whose_wait_is_interrupted_is_cancelled(thread, monkeypatch):
    begun, cancelled = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupted(future: object, timeout: float | None = None) -> None:
        assert begun.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(endless())
    monkeypatch.undo()
    assert cancelled.wait(30)


def test_the_last_work_is_done_before_the_end_and_a_second_end_does_nothing():
    thread, done = LoopThread(NAME), list[str]()

    async def last() -> None:
        done.append(threading.current_thread().name)

    assert is_running()
    assert not thread.has_ended
    for _ in range(2):
        thread.end(last)
        assert thread.has_ended
        assert not is_running()
    assert done == [NAME]


def test_work_is_awaited_in_another_loop(thread):
    async def where() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def fail() -> None:
        raise ValueError("a mood")

    assert asyncio.run(thread.ask(where())) == NAME
    with pytest.raises(ValueError, match="a mood"):
        asyncio.run(thread.ask(fail()))


def test_work_is_cancelled_with_the_task_that_awaits_it(thread):
    begun, cancelled = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def give_up() -> None:
        task = asyncio.create_task(thread.ask(endless()))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(give_up())
    assert cancelled.wait(30)


def test_an_error_of_a_callback_is_passed_on():
    defects: list[BaseException] = []
    thread = LoopThread(NAME, on_defect=defects.append)

    def fail() -> None:
        raise ValueError("a mood")

    thread.call_soon(fail)
    thread.call_soon(thread.loop.call_exception_handler, {"message": "a bug in a task"})
    thread.end(nothing)
    assert [(type(defect), str(defect)) for defect in defects] == [
        (ValueError, "a mood"),
        (RuntimeError, "a bug in a task"),
    ]


def test_an_error_of_the_last_work_is_raised_and_the_end_can_be_tried_again():
    thread = LoopThread(NAME)

    async def fail() -> None:
        raise ValueError("a mood")

    with pytest.raises(ValueError, match="a mood"):
        thread.end(fail)
    assert not thread.has_ended
    thread.end(nothing)
    assert thread.has_ended


def test_a_task_that_hangs_does_not_hold_up_the_end():
    thread, tries = LoopThread(NAME), list[int]()
    thread.loop.set_exception_handler(lambda *found: None)  # otherwise asyncio reports the unfinished task later

    async def hang() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                tries.append(1)

    async def begin() -> "asyncio.Task[None]":
        task = asyncio.create_task(hang())
        await asyncio.sleep(0)
        return task

    task = thread.run(begin())

    async def last() -> None:
        task.cancel()
        await asyncio.sleep(0)

    thread.end(last)
    assert tries == [1]
    assert not task.done()
    assert not is_running()
