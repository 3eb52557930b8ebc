"""The process that loads a user's environment file once and forks a child for each episode.

The children share the memory of all that the file loads, and start in a few milliseconds. The server has one thread:
a fork copies only the thread that calls it. It alone kills and reaps its children, so it never signals a process
number that another process has got since. Limits of time are the driver's business (episode_processes.py).

Protocol: JSON, one value a line. In: `[source]`, then `["start", number]` with the child's socket beside it, and
`["end", number, seconds]`: the child is killed if it has not ended by itself within so many seconds. Out:
`{"value": facts}` or `{"reason": ..., "trace": ...}`, then `[number, how, code]` when a child has ended by itself, with
the code and the status of `os.waitid`, or `[number, reason]` if it could not start. A child reads actions from its
socket and answers them (wire.py); at the end of the stream it closes its object.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from rlhf_cli.agents.environment_class import EnvironmentClass, load_class, tool_schemas
from rlhf_cli.agents.environment_object import EnvironmentObject
from rlhf_cli.agents.wire import read_action, reply_line
from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.workers.user_module import file_and_name
from rlhf_cli.rewards.workers.worker import die_with_lifeline, failure_of, own_file

_RECEIVE_SIZE = 1 << 16
_MAX_SOCKETS = 64  # that one message can bring
_LOOK_MS = 1_000  # between looks at whether the driver is there, for systems without a signal of the lifeline


def main(channel_fd: int, lifeline_fd: int, parent: int) -> None:
    """Serve until the driver is gone, given the descriptors of socket and lifeline and the driver's process id."""
    for descriptor in (channel_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    die_with_lifeline(lifeline_fd)
    channel = socket.socket(fileno=channel_fd)
    requests = _Requests(channel)
    try:
        found = load_class(*file_and_name(requests.first()))
        _refuse_threads()
        facts = _facts(found)
    except BaseException as error:
        _send(channel, failure_of(error))
        return
    _send(channel, {"value": facts})
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, the shared memory
    _Server(channel, requests, lifeline_fd, parent, found).serve()


def _refuse_threads() -> None:
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        raise BadResult(
            f"starts the thread {others[0]!r} while it is loaded; start it in reset, since each episode has a forked "
            "process of its own, without that thread"
        )


def _facts(found: EnvironmentClass) -> dict[str, object]:
    """Return the class's facts. A child makes the schemas, so that the server does not keep their libraries."""
    return {
        "name": found.type.__name__,
        "about": found.about,
        "has_close": found.has_close,
        "owns_reward": found.owns_reward,
        "tools": _schemas(found),
        "columns": asdict(found.columns),
    }


def _schemas(found: EnvironmentClass) -> object:
    """Return the schemas of the tools, from a forked child. Raises BadResult if it failed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writer, "wb") as stream:
                stream.write(_schemas_or_failure(found))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    answer = json.loads(text) if text else {"reason": "ended the process that describes its tools"}
    if "value" not in answer:
        raise BadResult(answer["reason"])
    return answer["value"]


def _schemas_or_failure(found: EnvironmentClass) -> bytes:
    try:
        return json.dumps({"value": tool_schemas(found)}).encode()
    except BaseException as error:
        return json.dumps(failure_of(error)).encode()


class _Requests:
    """The lines of the driver, and the sockets that came with them."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._received = b""
        self.sockets: deque[int] = deque()  # in the order of the lines that take them

    def receive(self) -> list[Any] | None:
        """Return the lines that have arrived; wait for data; None if the driver is gone."""
        data, sockets, _, _ = socket.recv_fds(self._channel, _RECEIVE_SIZE, _MAX_SOCKETS)
        for descriptor in sockets:
            os.set_inheritable(descriptor, False)
        self.sockets += sockets
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def first(self) -> str:
        """Wait for the first line and return its source."""
        while not (lines := self.receive()):
            if lines is None:
                os._exit(0)  # the driver is gone
        ((source,),) = lines
        return str(source)


class _Server:
    """Forks, kills and reaps."""

    def __init__(
        self, channel: socket.socket, requests: _Requests, lifeline: int, parent: int, found: EnvironmentClass
    ) -> None:
        self._channel, self._requests, self._lifeline, self._parent = channel, requests, lifeline, parent
        self._found = found
        self._pids: dict[int, int] = {}  # of the children by their number
        self._numbers: dict[int, int] = {}  # the inverse
        self._ending: dict[int, float] = {}  # when children are to be killed that the driver has forgotten
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)

    def serve(self) -> None:
        """Do as the driver asks until it has no more requests, then kill all children but those that close."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        waiting = select.poll()
        for descriptor in (self._channel.fileno(), self._wake, self._lifeline):
            waiting.register(descriptor, select.POLLIN)
        try:
            is_open = True
            while is_open or self._ending:
                events = dict(waiting.poll(self._patience_ms()))
                if self._wake in events:
                    os.read(self._wake, 512)
                if is_open and self._channel.fileno() in events and not self._obey():
                    is_open = False
                    waiting.unregister(self._channel)
                    for number in list(self._pids):
                        self._end(number, 0.0)
                _kill(*[pid for pid, end in self._ending.items() if end <= time.monotonic()])
                self._reap()
                if self._lifeline in events or os.getppid() != self._parent:
                    break
        finally:
            _kill(*self._numbers, *self._ending)

    def _patience_ms(self) -> float:
        left = [1000 * (end - time.monotonic()) for end in self._ending.values()]
        return max(1.0, min([_LOOK_MS, *left]))

    def _obey(self) -> bool:
        """Do as the lines ask; return False if there are no more."""
        lines = self._requests.receive()
        for word, number, *seconds in lines or []:
            if word == "start":
                self._start(number)
            else:
                self._end(number, *seconds)
        return lines is not None

    def _end(self, number: int, seconds: float) -> None:
        """Let a child end by itself within so many seconds; it is not reported."""
        pid = self._pids.pop(number, None)
        if pid is not None:
            del self._numbers[pid]
            self._ending[pid] = time.monotonic() + seconds

    def _start(self, number: int) -> None:
        channel = socket.socket(fileno=self._requests.sockets.popleft())
        try:
            pid = os.fork()
        except OSError as error:  # no more processes or memory
            channel.close()
            _send(self._channel, [number, f"could not be started: {error.strerror}"])
            return
        if pid == 0:
            self._be_child(channel)
        channel.close()
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the child has done it, or has ended
            os.setpgid(pid, pid)
        self._pids[number], self._numbers[pid] = pid, number

    def _be_child(self, channel: socket.socket) -> None:
        """Answer the actions of one episode in the forked process, and never return."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)  # a group of its own, so that its children are killed with it
            die_with_lifeline(own_file(self._lifeline))
            for descriptor in (self._lifeline, self._wake, self._waker):
                os.close(descriptor)
            self._channel.close()
            _answer_actions(channel, EnvironmentObject(self._found))
        except OSError:
            pass  # the driver is gone
        finally:
            os._exit(0)

    def _reap(self) -> None:
        """Report the children that have ended by themselves, and kill what they have left."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            _kill(ended.si_pid)  # its number is its own until it is reaped
            os.waitpid(ended.si_pid, 0)
            self._ending.pop(ended.si_pid, None)
            number = self._numbers.pop(ended.si_pid, None)
            if number is not None:
                del self._pids[number]
                _send(self._channel, [number, ended.si_code, ended.si_status])


def _kill(*leaders: int) -> None:
    """Kill process groups; their leaders are reaped when their end is noticed."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _answer_actions(channel: socket.socket, environment: EnvironmentObject) -> None:
    for line in channel.makefile("rb"):
        channel.sendall(reply_line(environment.answer(read_action(line))))
    environment.close()


def _send(channel: socket.socket, line: object) -> None:
    channel.sendall(json.dumps(line).encode() + b"\n")
