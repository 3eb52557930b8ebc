"""A worker process: loads one task, then answers items one by one until it is killed.

Items of one list whose answers have to be awaited are worked on together, in an event loop that serves all lists, and
answered as each is done.

Started by pool.py in an interpreter of its own, so it inherits no threads and no memory of the trainer, and it
imports nothing heavy itself. Limits of time are the pool's business: a worker may hang.

Protocol: one JSON value per line over a socket. In: `[loader, argument]`, then lists of items. Out: one answer to the
loader, whose value is the task's `about`, and one to each item as soon as it is there: `{"value": ...}`
or `{"kind": ..., "reason": ..., "trace": ...}`, that to an item with its `place` in the list; `{"together": true}`
before items are worked on together.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from rlhf_cli.rewards.records import BadResult

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")  # its frames are ours
MAX_REASON = 300  # characters of an error's message


def main(channel_fd: int, lifeline_fd: int, parent: int) -> None:
    """Serve until the other end is gone, given the descriptors of socket and lifeline and the parent's process id."""
    for descriptor in (channel_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    die_with_parent(lifeline_fd, parent)
    serve(socket.socket(fileno=channel_fd))


def serve(channel: socket.socket) -> None:
    """Load the task that the first line names and answer the items of all further lines."""
    lines = channel.makefile("rb")
    failure, handle = _attempt(_load, *json.loads(lines.readline()))
    _send(channel, failure or {"value": getattr(handle, "about", None)})
    if failure:
        return
    answers = _Answers(channel)
    for line in lines:
        for place, item in enumerate(json.loads(line)):
            answers.give(place, _attempt(handle, item))
        answers.await_all()


class _Answers:
    """Sends the outcomes of a list's items."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._runner: Any = None  # an asyncio.Runner, imported when a function has to be awaited
        self._awaited: list[tuple[int, Awaitable[object]]] = []  # place and result to await

    def give(self, place: int, attempt: "_Attempt") -> None:
        """Send it, or keep it if it has to be awaited."""
        failure, value = attempt
        if isinstance(value, Awaitable):
            self._awaited.append((place, value))
        else:
            self._send(place, failure, value)

    def await_all(self) -> None:
        """Await the kept results, all at once, and send each as soon as it is there."""
        if not self._awaited:
            return
        import asyncio  # 40 ms that a plain function does not need

        async def all_at_once(awaited: list[tuple[int, Awaitable[object]]]) -> None:
            await asyncio.gather(*(self._await(place, value) for place, value in awaited))

        awaited, self._awaited = self._awaited, []
        _send(self._channel, {"together": True})
        self._runner = self._runner or asyncio.Runner()  # one for all lists: sessions that a user keeps stay valid
        self._runner.run(all_at_once(awaited))

    async def _await(self, place: int, value: Awaitable[object]) -> None:
        try:
            failure, found = {}, await value
        except BaseException as error:
            failure, found = failure_of(error), None
        self._send(place, failure, found)

    def _send(self, place: int, failure: dict[str, object], value: object) -> None:
        _send(self._channel, {"place": place} | (failure or {"value": value}))


def _send(channel: socket.socket, reply: dict[str, object]) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")


def die_with_parent(lifeline_fd: int, parent: int) -> None:
    """End this process and its children when the parent is gone, however it ended and whatever runs here.

    A thread covers systems without the lifeline's signal, and a writing end that was inherited by someone else.
    """
    die_with_lifeline(lifeline_fd)
    poller = select.poll()  # unlike select(), it takes descriptors above 1,024
    poller.register(lifeline_fd, select.POLLIN)

    def watch() -> None:
        while not poller.poll(1_000) and os.getppid() == parent:
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def die_with_lifeline(lifeline_fd: int) -> None:
    """Have the kernel end this process group when the last writer of the lifeline is gone; does nothing elsewhere.

    The lifeline is the reading end of a pipe nobody writes to. The kernel sends SIGKILL to the process group, which
    also works while code holds the interpreter lock for good (for example a hopeless regular expression).
    PR_SET_PDEATHSIG would not do: it fires when the parent's *thread* that started us ends.
    """
    with contextlib.suppress(ImportError, AttributeError, OSError):  # F_SETSIG is Linux's own
        import fcntl

        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)


def own_file(lifeline: int) -> int:
    """Return the lifeline as a file of its own, because the process group that gets the signal belongs to a file."""
    try:
        return os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return os.dup(lifeline)


def _load(loader: str, argument: object) -> Callable[[object], object]:
    """Return the function that `module:function` returns for the argument."""
    module, _, function = loader.partition(":")
    handle: Callable[[object], object] = getattr(importlib.import_module(module), function)(argument)
    return handle


_Attempt = tuple[dict[str, object], Any]
"""(failure or nothing, the function's result)."""


def _attempt(function: Callable[..., object], *arguments: object) -> _Attempt:
    try:
        return {}, function(*arguments)
    except BaseException as error:
        return failure_of(error), None


def failure_of(error: BaseException) -> dict[str, object]:
    """Return the answer; sys.exit() in a reward is a failure of that reward as well."""
    if isinstance(error, BadResult):
        return {"kind": "bad_result", "reason": str(error), "trace": ""}
    return {"kind": "raised", "reason": describe_error(error), "trace": own_trace(error)}


def describe_error(error: BaseException) -> str:
    """Return `raised ValueError: message (reward.py, line 7)` in one line; the place is the innermost of the user's
    own.
    """
    message = " ".join(str(error).split())[:MAX_REASON]
    raised = f"raised {type(error).__name__}" + (f": {message}" if message else "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return raised + place


def own_trace(error: BaseException) -> str:
    """Return the traceback from the first frame of the user's own on."""
    start = error.__traceback__
    while start is not None and not _is_own(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start))


def _is_own(filename: str) -> bool:
    """Return whether a file is neither of this package nor of Python or an installed package."""
    foreign = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not filename.startswith(("<", _PACKAGE, *foreign))
