"""Worker process: loads one task, then handles items until it is killed.

Items are handled one by one. Async results from the same list are awaited concurrently in an event loop that persists
across lists, and sent as they complete. pool.py starts the worker as a new interpreter and enforces timeouts. This
module imports nothing heavy.

Protocol: one JSON value per line over a socket.

- Input: `[loader, argument]`, then lists of items.
- Output: one answer to the loader, with the task's `about` as value, then one per item, with `place`, the position in
  the list.
- An answer is `{"value": ...}` or `{"kind": ..., "reason": ..., "trace": ...}`.
- `{"together": true}` announces that the remaining items in the list are handled concurrently.
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

# Frames from these files are hidden in tracebacks.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")
# Characters kept from an error message.
_MAX_REASON = 300


def main(channel_fd: int, lifeline_fd: int, parent: int) -> None:
    """Serve until the parent closes the socket. Takes two file descriptors and the parent's pid."""
    # Processes that user code starts must not hold the socket open after this worker exits.
    for descriptor in (channel_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    _die_with_parent(lifeline_fd, parent)
    _serve(socket.socket(fileno=channel_fd))


def _serve(channel: socket.socket) -> None:
    """Load the task from the first line, then handle the items from all further lines."""
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
    """Sends item results and awaits async ones."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        # An asyncio.Runner, created for the first async result.
        self._runner: Any = None
        # Positions and pending results.
        self._awaited: list[tuple[int, Awaitable[object]]] = []

    def give(self, place: int, attempt: "_Attempt") -> None:
        """Send a result, or keep it if it must be awaited."""
        failure, value = attempt
        if isinstance(value, Awaitable):
            self._awaited.append((place, value))
        else:
            self._send(place, failure, value)

    def await_all(self) -> None:
        """Await all kept results concurrently and send each one when it completes."""
        if not self._awaited:
            return
        # Imported lazily: it takes 40 ms, which a plain function does not need.
        import asyncio

        async def all_at_once(awaited: list[tuple[int, Awaitable[object]]]) -> None:
            await asyncio.gather(*(self._await(place, value) for place, value in awaited))

        awaited, self._awaited = self._awaited, []
        _send(self._channel, {"together": True})
        # One event loop for all lists: HTTP sessions that user code keeps are bound to it.
        self._runner = self._runner or asyncio.Runner()
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


def _die_with_parent(lifeline_fd: int, parent: int) -> None:
    """Kill this process group when the parent dies, for whatever reason."""
    die_with_lifeline(lifeline_fd)
    # The thread covers systems without F_SETSIG, and write ends that another process has inherited.
    # poll instead of select, which fails for descriptors above 1,024.
    poller = select.poll()
    poller.register(lifeline_fd, select.POLLIN)

    def watch() -> None:
        while not poller.poll(1_000) and os.getppid() == parent:
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def die_with_lifeline(lifeline_fd: int) -> None:
    """Let the kernel kill this process group when the last writer closes the lifeline. No-op outside Linux.

    The lifeline is the read end of a pipe that nobody writes to.
    """
    # A signal from the kernel works even if user code never releases the GIL (catastrophic regular expressions).
    # PR_SET_PDEATHSIG is not an option: it fires when the parent *thread* that started this process exits.
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)


def own_file(lifeline: int) -> int:
    """Reopen the lifeline as a separate open file: F_SETOWN sets one process group per open file."""
    try:
        return os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return os.dup(lifeline)


def _load(loader: str, argument: object) -> Callable[[object], object]:
    """Call `module:function` with the argument and return the handler."""
    module, _, function = loader.partition(":")
    handle: Callable[[object], object] = getattr(importlib.import_module(module), function)(argument)
    return handle


_Attempt = tuple[dict[str, object], Any]
"""(failure, or an empty dict on success; result)."""


def _attempt(function: Callable[..., object], *arguments: object) -> _Attempt:
    # BaseException: sys.exit() in a reward function is a failure too.
    try:
        return {}, function(*arguments)
    except BaseException as error:
        return failure_of(error), None


def failure_of(error: BaseException) -> dict[str, object]:
    """Convert an exception to a failed answer."""
    if isinstance(error, BadResult):
        return {"kind": "bad_result", "reason": str(error), "trace": ""}
    return {"kind": "raised", "reason": describe_error(error), "trace": own_trace(error)}


def describe_error(error: BaseException) -> str:
    """Return `raised ValueError: message (reward.py, line 7)`, with the innermost frame in user code."""
    message = " ".join(str(error).split())[:_MAX_REASON]
    raised = f"raised {type(error).__name__}" + (f": {message}" if message else "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return raised + place


def own_trace(error: BaseException) -> str:
    """Return the traceback, starting at the first frame in user code."""
    start = error.__traceback__
    while start is not None and not _is_own(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start))


def _is_own(filename: str) -> bool:
    """Return whether a file is user code: not in this package, the standard library or site-packages."""
    foreign = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not filename.startswith(("<", _PACKAGE, *foreign))
