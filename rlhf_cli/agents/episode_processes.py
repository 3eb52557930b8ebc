"""All episode processes, seen from one event loop: start, send actions, receive replies, enforce timeouts, kill.

Nothing here blocks on an environment: sockets are non-blocking, and unsent data is buffered. The processes are children
of the fork server (fork_server.py), which reports their exits.
"""

import asyncio
import errno
import itertools
import json
import resource
import socket
from collections import deque
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
    reply: "asyncio.Future[Reply] | None" = None
    """Gets the reply to the current action."""
    place: str = ""
    """Methods that the current action calls, for messages."""
    end: str | None = None
    """Why the process no longer replies, as the end of a sentence."""


class EpisodeProcesses:
    """Sends actions to processes, at most `num_workers` at a time. Works in `loop`.

    The first action of an episode starts a process. A timeout starts when the process receives the action.
    """

    def __init__(
        self,
        server: ChildProcess,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout: float,
        close_seconds: float,
        num_workers: int,
    ) -> None:
        """Start listening. `close_seconds` is the timeout for `close` methods, 0 if the class has none."""
        self._server, self._loop = server, loop
        self._timeout, self._close_seconds, self._num_workers = timeout, close_seconds, num_workers
        # By number, which an episode that starts again gets anew: the server reports exits by number.
        self._processes: dict[int, _Process] = {}
        self._episodes: dict[int, int] = {}
        self._count = itertools.count()
        self._defect: BaseException | None = None
        # Processes with a queued action.
        self._waiting: deque[_Process] = deque()
        # Processes with an action in progress, and the timers of their timeouts.
        self._running: dict[_Process, asyncio.TimerHandle] = {}
        self._to_server: deque[tuple[bytes, socket.socket | None]] = deque()
        self._from_server = b""
        server.socket.setblocking(False)
        loop.call_soon_threadsafe(loop.add_reader, server.socket, self._attend_server)

    async def close(self) -> None:
        """End all processes, then wait for the fork server, which waits for them."""
        self._waiting.clear()
        for episode in list(self._episodes):
            self.drop(episode)
        self._server.socket.settimeout(_END_SECONDS)
        self._flush_server()
        # Whatever is still queued could not be sent, because the server has exited.
        for _, theirs in self._to_server:
            if theirs is not None:
                theirs.close()
        self._ignore(self._server.socket)
        self._server.finish(self._close_seconds + _END_SECONDS)

    async def answer(self, episode: int, line: bytes, place: str) -> Reply:
        """Queue an encoded action, and wait for the reply. `place` names the methods that it calls.

        Raises the exception passed to `break_down`.
        """
        if self._defect is not None:
            raise self._defect
        number = self._episodes.setdefault(episode, next(self._count))
        process = self._processes.setdefault(number, _Process(number))
        process.outgoing, process.place, process.reply = bytearray(line), place, self._loop.create_future()
        self._waiting.append(process)
        self._hand_out()
        return await process.reply

    def break_down(self, defect: BaseException) -> None:
        """Raise an exception in current and future callers, because no more replies will come."""
        self._defect = defect
        for process in self._processes.values():
            if process.reply is not None and not process.reply.done():
                process.reply.set_exception(defect)

    def drop(self, episode: int) -> None:
        """End an episode's process, and cancel its action. An idle process may close the user's object first."""
        if episode in self._episodes:
            process = self._processes.pop(self._episodes.pop(episode))
            if process.reply is not None:
                process.reply.cancel()
            # A busy process cannot read the end of its stream, so waiting for the `close` method is useless.
            self._end(process, seconds=0.0 if process in self._running else self._close_seconds)
            self._stop_timer(process)
            self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and len(self._running) < self._num_workers:
            process = self._waiting.popleft()
            # Not dropped since it was queued.
            if process.number in self._processes:
                self._give(process)

    def _give(self, process: _Process) -> None:
        # Before starting the process: forking and startup count against the timeout of the first action.
        self._running[process] = self._loop.call_later(self._timeout, self._give_up, process)
        if process.end is None and process.channel is None:
            self._begin(process)
        if process.end is not None:
            self._fail(process, Reply(failure=process.end))
            return
        self._flush(process)

    def _give_up(self, process: _Process) -> None:
        """Fail an action that is late, unless its reply is here, which the loop may have been too busy to read."""
        while self._receive(process):
            pass
        if process in self._running:
            self._fail(process, late_reply(self._timeout, process.place))

    def _stop_timer(self, process: _Process) -> None:
        if process in self._running:
            self._running.pop(process).cancel()

    def _begin(self, process: _Process) -> None:
        """Ask the server to fork a process."""
        try:
            process.channel, theirs = _socket_pair()
        except OSError as error:
            process.end = _too_many_files() if error.errno == errno.EMFILE else f"could not be started: {error}"
            return
        process.channel.setblocking(False)
        self._loop.add_reader(process.channel, self._receive, process)
        self._ask(["start", process.number], theirs)

    def _flush(self, process: _Process) -> None:
        """Send as much of the action as the process accepts now."""
        assert process.channel is not None
        self._loop.remove_writer(process.channel)
        try:
            while process.outgoing:
                del process.outgoing[: process.channel.send(process.outgoing)]
        except BlockingIOError:
            self._loop.add_writer(process.channel, self._flush, process)
        # A broken connection is no failure yet: the server reports why the process exited.
        except OSError:
            process.outgoing.clear()

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
            # A closed stream is always readable, so the loop would spin.
            self._ignore(process.channel)
            process.outgoing.clear()
        # A process has one action at a time and replies in one line, so a trailing newline completes the reply.
        elif data.endswith(b"\n") and process in self._running:
            reply = read_reply(bytes(process.received))
            process.received.clear()
            self._conclude(process, reply)
        return bool(data)

    def _fail(self, process: _Process, failure: Reply) -> None:
        """Fail the current action and all later ones."""
        process.end = failure.failure
        self._end(process, seconds=0.0)
        self._conclude(process, failure)

    def _conclude(self, process: _Process, reply: Reply) -> None:
        self._stop_timer(process)
        # Done: the caller has given up, or the server has exited.
        if process.reply is not None and not process.reply.done():
            process.reply.set_result(reply)
        # Not at once: each queued action may fail at once and would call this again.
        self._loop.call_soon(self._hand_out)

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
        self._loop.remove_writer(channel)
        # The kernel queues a message this small completely or not at all, so a line is never split.
        try:
            while self._to_server:
                line, theirs = self._to_server[0]
                if theirs is None:
                    channel.send(line)
                else:
                    socket.send_fds(channel, [line], [theirs.fileno()])
                    theirs.close()
                self._to_server.popleft()
        # The server has exited: reading reports it.
        except ConnectionError:
            pass
        # The socket is full, or holds as many descriptors as the kernel allows.
        except OSError:
            self._loop.add_writer(channel, self._flush_server)

    def _attend_server(self) -> None:
        """Read the server's reports about exited processes."""
        try:
            data = self._server.socket.recv(_RECEIVE_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ignore(self._server.socket)
            raise ProcessDied(f"the environment fork server {self._server.last_words()}")
        *lines, self._from_server = (self._from_server + data).split(b"\n")
        for line in lines:
            number, *how = json.loads(line)
            if number in self._processes:
                # Two values are the code and status from waitid; one is a reason.
                self._note_end(self._processes[number], describe_end(*how) if len(how) == 2 else how[0])

    def _note_end(self, process: _Process, end: str) -> None:
        """Record an exit: take the last reply, or fail the current action."""
        # The report may arrive before the reply, which travels through another socket.
        if process.channel is not None:
            while self._receive(process):
                pass
            self._forget(process)
        process.end = process.end or end
        if process in self._running:
            self._fail(process, Reply(failure=end))

    def _ignore(self, channel: socket.socket) -> None:
        self._loop.remove_reader(channel)
        self._loop.remove_writer(channel)


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
