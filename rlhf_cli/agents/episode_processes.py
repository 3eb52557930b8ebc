"""The processes of all episodes as one thread of the driver sees them: begun, given actions, heard, found late, killed.

Nothing here waits for an environment: sockets do not block, and data that they do not take yet is kept. The processes
are children of the fork server (fork_server.py), which reports their ends.
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
_END_SECONDS = 10.0  # for the server to end after its processes


@dataclass(eq=False)
class _Process:
    """The process of one episode, known by its number. `channel` is None before it begins and after its end."""

    number: int
    channel: socket.socket | None = None
    outgoing: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    place: str = ""
    """The methods that the current action calls, for messages."""
    deadline: float = 0.0
    """Of the current action."""
    end: str | None = None
    """Why it no longer answers, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Order:
    """An action for a process as a line; `place` names the methods that it calls."""

    number: int
    line: bytes
    place: str


class EpisodeProcesses:
    """Gives orders to processes, at most `num_workers` at a time, and collects replies; for one thread.

    The first order of a number begins its process. The clock of an order starts when the process gets it.
    """

    def __init__(
        self, server: ChildProcess, bell: socket.socket, *, timeout: float, close_seconds: float, num_workers: int
    ) -> None:
        """Begin to listen; `close_seconds` is the limit for closing an object, 0 if objects are not closed."""
        self._server, self._timeout, self._num_workers = server, timeout, num_workers
        self._close_seconds = close_seconds
        self._processes: dict[int, _Process] = {}
        self._waiting: deque[Order] = deque()
        self._running: set[_Process] = set()
        self._replies: list[tuple[int, Reply]] = []
        self._to_server: deque[tuple[bytes, socket.socket | None]] = deque()
        self._from_server = b""
        self._selector = selectors.DefaultSelector()
        server.socket.setblocking(False)
        self._listen(server.socket, lambda: self._attend_server())
        self._listen(bell, lambda: bell.recv(4096))

    def close(self) -> None:
        """End all processes and wait for the server, which waits until they have ended."""
        for number in list(self._processes):
            self.drop(number)
        self._server.socket.settimeout(_END_SECONDS)
        self._flush_server()
        for _, theirs in self._to_server:  # the server is gone
            if theirs is not None:
                theirs.close()
        self._selector.close()
        self._server.finish(self._close_seconds + _END_SECONDS)

    def put(self, order: Order) -> None:
        """Take an order, which may have to wait for other ones."""
        self._processes.setdefault(order.number, _Process(order.number))
        self._waiting.append(order)

    def drop(self, number: int) -> None:
        """End a process and forget it and its orders. An idle one may close its object first."""
        process = self._processes.pop(number, None)
        if process is not None:
            is_idle = process not in self._running
            self._running.discard(process)
            self._end(process, seconds=self._close_seconds if is_idle else 0.0)

    def work(self) -> list[tuple[int, Reply]]:
        """Hand out orders, wait until something happens or the bell rings, and return the new replies by number."""
        self._hand_out()
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
            if process is not None:  # it may have been dropped since
                self._give(process, order)

    def _give(self, process: _Process, order: Order) -> None:
        process.place, process.deadline = order.place, time.monotonic() + self._timeout
        self._running.add(process)
        if process.end is None and process.channel is None:
            self._begin(process)
        if process.end is not None:
            self._fail(process, Reply(failure=process.end))
            return
        process.outgoing += order.line
        self._flush(process)

    def _begin(self, process: _Process) -> None:
        """Have the server fork."""
        try:
            process.channel, theirs = _socket_pair()
        except OSError as error:
            process.end = _too_many_files() if error.errno == errno.EMFILE else f"could not be started: {error}"
            return
        process.channel.setblocking(False)
        self._listen(process.channel, lambda: self._attend(process))
        self._ask(["start", process.number], theirs)

    def _attend(self, process: _Process) -> None:
        """Send the rest of an order, and take a reply."""
        if process.channel is None:  # it was killed while its event waited
            return
        if process.outgoing:
            self._flush(process)
        self._receive(process)

    def _flush(self, process: _Process) -> None:
        assert process.channel is not None
        with contextlib.suppress(OSError):  # a process that has ended is reported by the server
            while process.outgoing:
                del process.outgoing[: process.channel.send(process.outgoing)]
        self._listen(process.channel, lambda: self._attend(process), writes=bool(process.outgoing))

    def _receive(self, process: _Process) -> bool:
        """Take the reply if it is there; return whether there may be more data.

        After the end of the stream the server's report follows, or the deadline.
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
            self._ignore(process.channel)
            process.outgoing.clear()
        elif data.endswith(b"\n") and process in self._running:
            self._running.remove(process)
            self._replies.append((process.number, read_reply(bytes(process.received))))
            process.received.clear()
        return bool(data)

    def _fail(self, process: _Process, failure: Reply) -> None:
        """Reply to the current order with a failure; no order is answered from here on."""
        self._running.discard(process)
        self._replies.append((process.number, failure))
        process.end = failure.failure
        self._end(process, seconds=0.0)

    def _end(self, process: _Process, *, seconds: float) -> None:
        """End the stream, at which the process closes its object, and have it killed after so many seconds."""
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
        """Send the requests that the server takes. A message this small is taken as a whole or not at all."""
        channel = self._server.socket
        with contextlib.suppress(OSError):  # it is full, or its end is noticed by reading
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
        """Send the server's requests, and take its reports of processes that have ended by themselves."""
        if self._to_server:
            self._flush_server()
        try:
            data = self._server.socket.recv(_RECEIVE_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise ProcessDied(f"the process that environments are forked from {self._server.last_words()}")
        *lines, self._from_server = (self._from_server + data).split(b"\n")
        for line in lines:
            number, *how = json.loads(line)
            if number in self._processes:
                self._note_end(self._processes[number], describe_end(*how) if len(how) == 2 else how[0])

    def _note_end(self, process: _Process, end: str) -> None:
        """Take the last reply of a process that has ended; without one its order fails."""
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
        """Listen to a socket no longer, if it is listened to."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(channel)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets; raise the limit of open files to its maximum when it is reached."""
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
    return f"needs an open file, and this process may have no more than {limit} (ulimit -n)"
