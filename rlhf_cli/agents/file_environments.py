"""The environments of a run that are objects of a class in a user's file, each in a process of its own.

The file is never imported into the driver. A thread exchanges actions and replies with the processes, so `send` returns
at once and environments work while the caller does something else.
"""

import contextlib
import itertools
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from types import TracebackType
from typing import Self, cast

from rlhf_cli.agents.environment_class import ClassFacts, ResetColumns
from rlhf_cli.agents.episode_processes import EpisodeProcesses, Order
from rlhf_cli.agents.records import Action, Calls, EnvironmentDescription, Finish, Reply, Reset, Text
from rlhf_cli.agents.wire import action_line
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.workers.child import ChildProcess
from rlhf_cli.rewards.workers.process import LOAD_LIMIT
from rlhf_cli.rewards.workers.user_module import file_and_name

logger = logging.getLogger(__name__)

_SERVER = "rlhf_cli.agents.fork_server"

# Libraries of an environment get one thread: a pool of threads that a library starts while the file is loaded does not
# live on in the forked processes. Hashes of text repeat, so that the order of sets does.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class FileEnvironments:
    """Environments of `source`, FILE.py or FILE.py:CLASS; a context manager that leaves no process behind.

    An action may take `timeout` seconds; at most `num_workers` are worked on at a time, and the clock of the others
    starts when their turn comes. A process that hangs or dies costs its own episode alone.
    """

    def __init__(self, source: str, *, timeout: float, num_workers: int) -> None:
        self._source, self._timeout, self._num_workers = source, timeout, num_workers
        self._changed = threading.Condition()  # guards everything below
        self._orders: deque[Order | int] = deque()  # not yet seen by the thread; a number alone is to be dropped
        self._numbers: dict[int, int] = {}  # of the processes, by episode
        self._episodes: dict[int, int] = {}  # the inverse
        self._unanswered: set[int] = set()
        self._replies: list[tuple[int, Reply]] = []
        self._defect: BaseException | None = None
        self._is_closed = False
        self._count = itertools.count()

    def __enter__(self) -> Self:
        """Load the file.

        Raises:
            UsageError: the file has no class that can be an environment.
        """
        path, _ = file_and_name(self._source)
        if not path.is_file():
            raise UsageError(f"--environment {self._source}: there is no such file")
        self._server = ChildProcess(_SERVER, _ENVIRONMENT)
        try:
            facts = self._load()
        except BaseException:
            self._server.kill()
            raise
        self._columns, self._class_name = facts["columns"], facts["name"]
        self._close_seconds = self._timeout if facts["has_close"] else 0.0
        about = f"{facts['name']} of {path.name}: {facts['about']}"
        self._description = EnvironmentDescription(tuple(facts["tools"]), about)
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="environments", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; environments with a method `close` get as much time for it as for an action."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._ring()
        self._thread.join()
        self._bell.close()
        self._button.close()
        self._server.kill()

    @property
    def description(self) -> EnvironmentDescription:
        return self._description

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise UsageError if `reset` needs a column that is not among these columns of a row."""
        problem = self._columns.missing(columns)
        if problem is not None:
            raise UsageError(f"--environment {self._source}: {self._class_name} {problem}")

    def send(self, episode: int, action: Action) -> None:
        """Give the environment of that episode an action; `Reset` begins its process."""
        line = action_line(action)
        with self._changed:
            self._raise_defect()
            if isinstance(action, Reset):
                self._drop(episode)
                self._numbers[episode] = number = next(self._count)
                self._episodes[number] = episode
            number = self._numbers[episode]
            assert number not in self._unanswered, f"episode {episode} has an action on its way"
            self._unanswered.add(number)
            self._orders.append(Order(number, line, _place(action)))
        self._ring()

    def collect(self, timeout: float | None = None) -> list[tuple[int, Reply]]:
        """Return the replies since the last call, each with its episode. Wait for one, at most `timeout` seconds.

        Returns at once if no action is on its way.

        Raises:
            ProcessDied: the process that loaded the file has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._defect or self._replies or not self._unanswered, timeout)
            self._raise_defect()
            replies, self._replies = self._replies, []
            return [(self._episodes[number], reply) for number, reply in replies]

    def end(self, episode: int) -> None:
        """End the process of that episode; its reply, if it owes one, never comes.

        A method `close` is called, unless the environment is at work on an action.
        """
        with self._changed:
            self._drop(episode)
        self._ring()

    def _drop(self, episode: int) -> None:
        number = self._numbers.pop(episode, None)
        if number is not None:
            del self._episodes[number]
            self._unanswered.discard(number)
            self._replies = [one for one in self._replies if one[0] != number]
            self._orders.append(number)
            self._changed.notify_all()  # nothing may be left to wait for

    def _load(self) -> ClassFacts:
        """Return the description that the server sends when it has loaded the file."""
        channel, deadline = self._server.socket, time.monotonic() + LOAD_LIMIT
        channel.sendall(json.dumps([self._source]).encode() + b"\n")
        received = b""
        while not received.endswith(b"\n"):
            channel.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = channel.recv(1 << 16)
            except TimeoutError:
                raise UsageError(f"--environment {self._source} was not loaded within {LOAD_LIMIT:g} s") from None
            if not data:
                raise UsageError(f"--environment {self._source} {self._server.last_words()} while it was loaded")
            received += data
        answer = json.loads(received)
        if "value" not in answer:
            logger.warning("%s %s\n%s", self._source, answer["reason"], answer["trace"])
            raise UsageError(f"--environment {self._source} {answer['reason']}")
        facts = cast(ClassFacts, answer["value"])
        return facts | {"columns": ResetColumns(**answer["value"]["columns"])}

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it is ringing already, or closed
            self._button.send(b"\0")

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise self._defect

    def _serve(self) -> None:
        processes = EpisodeProcesses(
            self._server,
            self._bell,
            timeout=self._timeout,
            close_seconds=self._close_seconds,
            num_workers=self._num_workers,
        )
        try:
            while not self._is_closed:
                with self._changed:
                    orders, self._orders = self._orders, deque()
                for order in orders:
                    if isinstance(order, Order):
                        processes.put(order)
                    else:
                        processes.drop(order)
                self._report(processes.work())
        except BaseException as defect:  # passed to the owner, who waits in another thread
            with self._changed:
                self._defect = defect
                self._changed.notify_all()
        finally:
            processes.close()

    def _report(self, replies: list[tuple[int, Reply]]) -> None:
        with self._changed:
            awaited = [(number, reply) for number, reply in replies if number in self._unanswered]
            if awaited:
                self._unanswered.difference_update(number for number, _ in awaited)
                self._replies += awaited
                self._changed.notify_all()


def _place(action: Action) -> str:
    """Return the methods that an action calls, for messages."""
    match action:
        case Reset():
            return "reset"
        case Calls(calls):
            return ", ".join(dict.fromkeys(call.name for call in calls))
        case Text():
            return "step"
        case Finish():
            return "get_reward"
