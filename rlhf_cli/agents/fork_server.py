"""The process that loads the code of an environment once and forks a child per episode.

Children share the memory of everything the file loads, and start within milliseconds. The server is single-threaded,
because a fork copies only the calling thread. Only the server kills and reaps its children, so it never signals a
reused process ID. The driver enforces timeouts (episode_processes.py).

Protocol: JSON lines.

- In: `[source]`, then `["start", number]` with the child's socket attached, and `["end", number, seconds]`, which kills
  the child if it has not exited within that time.
- Out: `{"value": facts}` or `{"reason": ..., "trace": ...}`. Later, for each child that exits by itself, `[number, how,
  code]` with code and status from `os.waitid`, or `[number, reason]` if it could not start.

A child reads actions from a socket and replies (wire.py). At the end of the stream it closes the user's object.
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

from rlhf_cli.agents.environment_class import EnvironmentClass, described, load_class, tool_schemas
from rlhf_cli.agents.environment_object import EnvironmentObject
from rlhf_cli.agents.wire import read_action, reply_line
from rlhf_cli.config.queries import HARBOR_PREFIX, TEXTARENA_PREFIX
from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.workers.user_module import file_and_name
from rlhf_cli.rewards.workers.worker import die_with_lifeline, failure_of, own_file

_RECEIVE_SIZE = 1 << 16
# File descriptors accepted per message; the kernel allows up to 253.
_MAX_SOCKETS = 64
# Interval for checking that the driver is alive, on systems without the lifeline signal.
_LOOK_MS = 1_000


def main(channel_fd: int, lifeline_fd: int, parent: int) -> None:
    """Serve until the driver is gone. Takes the descriptors of socket and lifeline, and the driver's process ID."""
    # pass_fds made them inheritable; programs started by user code must not hold them open.
    for descriptor in (channel_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    die_with_lifeline(lifeline_fd)
    channel = socket.socket(fileno=channel_fd)
    requests = _Requests(channel)
    try:
        found = _load(requests.first())
        _refuse_threads()
        facts = _facts(found)
    except BaseException as error:
        _send(channel, failure_of(error))
        return
    _send(channel, {"value": facts})
    gc.collect()
    # A garbage collection in a child would write to object headers, which copies the shared memory pages.
    gc.freeze()
    _Server(channel, requests, lifeline_fd, parent, found).serve()


def _load(source: str) -> EnvironmentClass:
    if source.startswith(TEXTARENA_PREFIX):
        from rlhf_cli.agents.textarena import game_class

        return described(game_class(source.removeprefix(TEXTARENA_PREFIX)))
    if source.startswith(HARBOR_PREFIX):
        from rlhf_cli.agents.harbor import task_class

        return described(task_class(source.removeprefix(HARBOR_PREFIX)))
    return load_class(*file_and_name(source))


def _refuse_threads() -> None:
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        raise BadResult(
            f"starts the thread {others[0]!r} during import; start it in reset, because each episode runs in a "
            "separate forked process, without that thread"
        )


def _facts(found: EnvironmentClass) -> dict[str, object]:
    """Describe the class for the driver."""
    return {
        "name": found.type.__name__,
        "about": found.about,
        "has_close": found.has_close,
        "owns_reward": found.owns_reward,
        # From a child, so that the server does not keep transformers loaded.
        "tools": _schemas(found),
        "columns": asdict(found.columns),
    }


def _schemas(found: EnvironmentClass) -> object:
    """Build the tool schemas in a forked child. Raises BadResult if that fails."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # os._exit skips atexit handlers and buffered output, which belong to the parent.
        try:
            with os.fdopen(writer, "wb") as stream:
                stream.write(_schemas_or_failure(found))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    answer = json.loads(text) if text else {"reason": "exited while its tools were described"}
    if "value" not in answer:
        raise BadResult(answer["reason"])
    return answer["value"]


def _schemas_or_failure(found: EnvironmentClass) -> bytes:
    try:
        return json.dumps({"value": tool_schemas(found)}).encode()
    except BaseException as error:
        return json.dumps(failure_of(error)).encode()


class _Requests:
    """Lines from the driver, and the sockets attached to them."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._received = b""
        # In the order of the "start" lines.
        self.sockets: deque[int] = deque()

    def receive(self) -> list[Any] | None:
        """Wait for data and return complete lines, or None if the driver is gone."""
        data, sockets, _, _ = socket.recv_fds(self._channel, _RECEIVE_SIZE, _MAX_SOCKETS)
        for descriptor in sockets:
            os.set_inheritable(descriptor, False)
        self.sockets += sockets
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def first(self) -> str:
        """Wait for the first line and return the source in it."""
        while not (lines := self.receive()):
            # The driver is gone.
            if lines is None:
                os._exit(0)
        ((source,),) = lines
        return str(source)


class _Server:
    """Forks, kills and reaps the children."""

    def __init__(
        self, channel: socket.socket, requests: _Requests, lifeline: int, parent: int, found: EnvironmentClass
    ) -> None:
        self._channel, self._requests, self._lifeline, self._parent = channel, requests, lifeline, parent
        self._found = found
        # Living children that the driver knows, by number and by pid.
        self._pids: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        # Children that the driver has dropped: pid to the time at which to kill them.
        self._ending: dict[int, float] = {}
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)

    def serve(self) -> None:
        """Serve requests until the driver closes the connection, then wait for children that are closing."""
        # poll() restarts after a signal (PEP 475), so SIGCHLD must also write to a descriptor that poll watches. That
        # requires a Python signal handler, even an empty one.
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
        """Handle requests. Returns False if the driver has closed the connection."""
        lines = self._requests.receive()
        for word, number, *seconds in lines or []:
            if word == "start":
                self._start(number)
            else:
                self._end(number, *seconds)
        return lines is not None

    def _end(self, number: int, seconds: float) -> None:
        """Give a child `seconds` to exit, without a report."""
        pid = self._pids.pop(number, None)
        if pid is not None:
            del self._numbers[pid]
            self._ending[pid] = time.monotonic() + seconds

    def _start(self, number: int) -> None:
        channel = socket.socket(fileno=self._requests.sockets.popleft())
        try:
            pid = os.fork()
        # The machine is out of processes or memory.
        except OSError as error:
            channel.close()
            _send(self._channel, [number, f"could not be started: {error.strerror}"])
            return
        if pid == 0:
            self._be_child(channel)
        channel.close()
        # Parent and child both set the group: whoever comes second may fail, and a kill must find it in any case.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        self._pids[number], self._numbers[pid] = pid, number

    def _be_child(self, channel: socket.socket) -> None:
        """Answer the actions for one episode in the forked process. Never returns."""
        try:
            # Inherited from the server: a signal here must not wake the server.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # A separate process group, so that killing it also kills programs that the environment starts.
            os.setpgid(0, 0)
            die_with_lifeline(own_file(self._lifeline))
            for descriptor in (self._lifeline, self._wake, self._waker):
                os.close(descriptor)
            self._channel.close()
            _answer_actions(channel, EnvironmentObject(self._found))
        # The driver is gone.
        except OSError:
            pass
        finally:
            os._exit(0)

    def _reap(self) -> None:
        """Report children that exited by themselves, and kill the programs they left behind."""
        while True:
            try:
                # WNOWAIT: until waitpid below, the pid cannot be reused, so killpg cannot hit another process.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            _kill(ended.si_pid)
            os.waitpid(ended.si_pid, 0)
            self._ending.pop(ended.si_pid, None)
            number = self._numbers.pop(ended.si_pid, None)
            if number is not None:
                del self._pids[number]
                _send(self._channel, [number, ended.si_code, ended.si_status])


def _kill(*leaders: int) -> None:
    """Kill process groups. `_Server` reaps the leaders after SIGCHLD."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _answer_actions(channel: socket.socket, environment: EnvironmentObject) -> None:
    for line in channel.makefile("rb"):
        channel.sendall(reply_line(environment.answer(read_action(line))))
    environment.close()


def _send(channel: socket.socket, line: object) -> None:
    channel.sendall(json.dumps(line).encode() + b"\n")
