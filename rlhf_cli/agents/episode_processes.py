"""All episode processes, seen from one driver thread: start, send actions, collect replies, enforce timeouts, kill.

Nothing here blocks on an environment: sockets are non-blocking, and unsent data is buffered. The processes are children
of the fork server (fork_server.py), which reports their exits.
"""

import contextlib
import errno
import json
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rlhf_cli.agents.records import Reply, late_reply
from rlhf_cli.agents.wire import read_reply
from rlhf_cli.errors import ProcessDied
from rlhf_cli.rewards.workers.child import ChildProcess, describe_end

_RECEIVE_SIZE = 1 << 20
# For the fork server to exit, after the episode processes.
_END_SECONDS = 10.0


@dataclass(eq=False)
class _Process:
    """A numbered episode process. `channel` is None before the start and after the exit."""

    number: int
    channel: socket.socket | None = None
    outgoing: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    place: str = ""
    """Methods that the current action calls, for messages."""
    deadline: float = 0.0
    """Deadline of the current action, in `time.monotonic` seconds."""
    end: str | None = None
    """Why the process no longer replies, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Order:
    """An encoded action for a process. `place` names the methods that it calls."""

    number: int
    line: bytes
    place: str


class EpisodeProcesses:
    """Sends orders to processes, at most `num_workers` at a time, and collects replies. Use it from one thread.

    The first order for a number starts a process. A timeout starts when the process receives the order.
    """

    def __init__(
        self, server: ChildProcess, bell: socket.socket, *, timeout: float, close_seconds: float, num_workers: int
    ) -> None:
        """Start listening. `close_seconds` is the timeout for `close` methods, 0 if the class has none."""
        self._server, self._timeout, self._num_workers = server, timeout, num_workers
        self._close_seconds = close_seconds
        self._processes: dict[int, _Process] = {}
        self._waiting: deque[Order] = deque()
        # Processes with an order in progress.
        self._running: set[_Process] = set()
        self._replies: list[tuple[int, Reply]] = []
        self._to_server: deque[tuple[bytes, socket.socket | None]] = deque()
        self._from_server = b""
        self._selector = selectors.DefaultSelector()
        server.socket.setblocking(False)
        self._listen(server.socket, lambda: self._attend_server())
        # The bell wakes `select` for new orders. One recv may drain more than one ring: the bytes carry no data.
        self._listen(bell, lambda: bell.recv(4096))

    def close(self) -> None:
        """End all processes, then wait for the fork server, which waits for them."""
        for number in list(self._processes):
            self.drop(number)
        self._server.socket.settimeout(_END_SECONDS)
        self._flush_server()
        # Whatever is still queued could not be sent, because the server has exited.
        for _, theirs in self._to_server:
            if theirs is not None:
                theirs.close()
        self._selector.close()
        self._server.finish(self._close_seconds + _END_SECONDS)

    def put(self, order: Order) -> None:
        """Queue an order."""
        self._processes.setdefault(order.number, _Process(order.number))
        self._waiting.append(order)

    def drop(self, number: int) -> None:
        """End a process and discard its orders. An idle process may close the user's object first."""
        process = self._processes.pop(number, None)
        if process is not None:
            is_idle = process not in self._running
            # A busy process cannot read the end of its stream, so waiting for the `close` method is useless.
            self._running.discard(process)
            self._end(process, seconds=self._close_seconds if is_idle else 0.0)

    def work(self) -> list[tuple[int, Reply]]:
        """Send queued orders, wait for an event or the bell, and return new replies by process number."""
        self._hand_out()
        # A handler may end other processes whose events are already in this list; each handler checks for that.
        for key, _ in self._selector.select(self._patience()):
            key.data()
        for process in [one for one in self._running if one.deadline <= time.monotonic()]:
            self._fail(process, late_reply(self._timeout, process.place))
        replies, self._replies = self._replies, []
        return replies

    def _patience(self) -> float | None:
        if self._replies:
            return 0.0
        if not self._running:
            return None
        return max(0.0, min(process.deadline for process in self._running) - time.monotonic())

    def _hand_out(self) -> None:
        while self._waiting and len(self._running) < self._num_workers:
            order = self._waiting.popleft()
            process = self._processes.get(order.number)
            # Dropped since it was queued.
            if process is not None:
                self._give(process, order)

    def _give(self, process: _Process, order: Order) -> None:
        process.place, process.deadline = order.place, time.monotonic() + self._timeout
        # Before starting the process: forking and startup count against the timeout of the first action.
        self._running.add(process)
        if process.end is None and process.channel is None:
            self._begin(process)
        if process.end is not None:
            self._fail(process, Reply(failure=process.end))
            return
        process.outgoing += order.line
        self._flush(process)

    def _begin(self, process: _Process) -> None:
        """Ask the server to fork a process."""
        try:
            process.channel, theirs = _socket_pair()
        except OSError as error:
            process.end = _too_many_files() if error.errno == errno.EMFILE else f"could not be started: {error}"
            return
        process.channel.setblocking(False)
        self._listen(process.channel, lambda: self._attend(process))
        self._ask(["start", process.number], theirs)

    def _attend(self, process: _Process) -> None:
        """Send remaining order bytes and receive a reply."""
        # Closed by an earlier handler in the same `select` result.
        if process.channel is None:
            return
        if process.outgoing:
            self._flush(process)
        self._receive(process)

    def _flush(self, process: _Process) -> None:
        assert process.channel is not None
        # A broken connection is no failure yet: the server reports why the process exited.
        with contextlib.suppress(OSError):
            while process.outgoing:
                del process.outgoing[: process.channel.send(process.outgoing)]
        self._listen(process.channel, lambda: self._attend(process), writes=bool(process.outgoing))

    def _receive(self, process: _Process) -> bool:
        """Receive data and record a complete reply. Returns whether more data may follow.

        At the end of the stream, the failure is left to the server's report or to the deadline.
        """
        assert process.channel is not None
        try:
            data = process.channel.recv(_RECEIVE_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        process.received += data
        if not data:
            # A closed stream is always readable, so `select` would spin.
            self._ignore(process.channel)
            process.outgoing.clear()
        # A process has one order at a time and replies in one line, so a trailing newline completes the reply.
        elif data.endswith(b"\n") and process in self._running:
            self._running.remove(process)
            self._replies.append((process.number, read_reply(bytes(process.received))))
            process.received.clear()
        return bool(data)

    def _fail(self, process: _Process, failure: Reply) -> None:
        """Fail the current order and all later ones."""
        self._running.discard(process)
        self._replies.append((process.number, failure))
        process.end = failure.failure
        self._end(process, seconds=0.0)

    def _end(self, process: _Process, *, seconds: float) -> None:
        """Close the stream, so that the process closes the user's object, and have it killed after `seconds`."""
        if process.channel is not None:
            self._forget(process)
            self._ask(["end", process.number, seconds])

    def _forget(self, process: _Process) -> None:
        assert process.channel is not None
        self._ignore(process.channel)
        process.channel.close()
        process.channel = None

    def _ask(self, request: list[object], theirs: socket.socket | None = None) -> None:
        self._to_server.append((json.dumps(request).encode() + b"\n", theirs))
        self._flush_server()

    def _flush_server(self) -> None:
        """Send as many requests as the server accepts now."""
        channel = self._server.socket
        # EAGAIN if the socket is full; if the server has exited, reading reports it. The kernel queues a message this
        # small completely or not at all, so a line is never split.
        with contextlib.suppress(OSError):
            while self._to_server:
                line, theirs = self._to_server[0]
                if theirs is None:
                    channel.send(line)
                else:
                    socket.send_fds(channel, [line], [theirs.fileno()])
                    theirs.close()
                self._to_server.popleft()
        self._listen(channel, self._attend_server, writes=bool(self._to_server))

    def _attend_server(self) -> None:
        """Send queued requests and read the server's reports about exited processes."""
        if self._to_server:
            self._flush_server()
        try:
            data = self._server.socket.recv(_RECEIVE_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise ProcessDied(f"the environment fork server {self._server.last_words()}")
        *lines, self._from_server = (self._from_server + data).split(b"\n")
        for line in lines:
            number, *how = json.loads(line)
            if number in self._processes:
                # Two values are the code and status from waitid; one is a reason.
                self._note_end(self._processes[number], describe_end(*how) if len(how) == 2 else how[0])

    def _note_end(self, process: _Process, end: str) -> None:
        """Record an exit: take the last reply, or fail the current order."""
        # The report may arrive before the reply, which travels through another socket.
        if process.channel is not None:
            while self._receive(process):
                pass
            self._forget(process)
        process.end = process.end or end
        if process in self._running:
            self._fail(process, Reply(failure=end))

    def _listen(self, channel: socket.socket, attend: Callable[[], object], *, writes: bool = False) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        known = self._selector.get_map().get(channel)
        if known is None:
            self._selector.register(channel, events, attend)
        elif known.events != events:
            self._selector.modify(channel, events, attend)

    def _ignore(self, channel: socket.socket) -> None:
        """Stop listening to a socket, if registered."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(channel)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Create a socket pair. Raises the soft limit for open files to the hard limit when it is reached."""
    try:
        return socket.socketpair()
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return socket.socketpair()


def _too_many_files() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"needs a file descriptor, but this process is limited to {limit} (ulimit -n)"
