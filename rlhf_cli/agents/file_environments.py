"""The environments of a run that are objects of a class in a user's file, each in a process of its own.

The file is never imported into the driver. A thread exchanges actions and replies with the processes, so `send` returns
at once and environments work while the caller does something else.
"""

import contextlib
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
from rlhf_cli.agents.mailbox import Mailbox
from rlhf_cli.agents.records import Action, EnvironmentDescription, Reply, Reset, method_names
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
        self._orders: deque[Order | int] = deque()  # not yet seen by the thread; a number alone is to be dropped
        self._mailbox = Mailbox()
        self._is_closed = False

    def __enter__(self) -> Self:
        """Load the file.

        Raises:
            UsageError: the file has no class that can be an environment.
        """
        path, _ = file_and_name(self._source)
        if path.is_dir():
            raise UsageError(f"--environment {self._source} is a folder: name the file in it, as {path / 'FILE.py'}")
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
        self._description = EnvironmentDescription(tuple(facts["tools"]), about, facts["owns_reward"])
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
        if isinstance(action, Reset):
            self._drop(episode)
        self._orders.append(Order(self._mailbox.ask(episode, action), line, method_names(action)))
        self._ring()

    def collect(self, timeout: float | None = None) -> list[tuple[int, Reply]]:
        """Return the replies since the last call, each with its episode. Wait for one, at most `timeout` seconds.

        Returns at once if no action is on its way.

        Raises:
            ProcessDied: the process that loaded the file has ended.
        """
        return self._mailbox.collect(timeout)

    def end(self, episode: int) -> None:
        """End the process of that episode; its reply, if it owes one, never comes.

        A method `close` is called, unless the environment is at work on an action.
        """
        self._drop(episode)
        self._ring()

    def _drop(self, episode: int) -> None:
        number = self._mailbox.drop(episode)
        if number is not None:
            self._orders.append(number)

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
            if answer["trace"]:
                logger.warning("%s %s\n%s", self._source, answer["reason"], answer["trace"])
            raise UsageError(f"--environment {self._source} {answer['reason']}")
        facts = cast(ClassFacts, answer["value"])
        return facts | {"columns": ResetColumns(**answer["value"]["columns"])}

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it is ringing already, or closed
            self._button.send(b"\0")

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
                while self._orders:
                    order = self._orders.popleft()
                    if isinstance(order, Order):
                        processes.put(order)
                    else:
                        processes.drop(order)
                self._mailbox.deliver(processes.work())
        except BaseException as defect:  # passed to the owner, who waits in another thread
            self._mailbox.break_down(defect)
        finally:
            processes.close()
