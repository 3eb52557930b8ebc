"""Environments defined by a class in a user's file, one process per episode.

The file is never imported into the driver. A thread exchanges actions and replies with the processes, so `send` does
not block and environments run while the caller does other work.
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

# One thread per library: worker threads that a library starts on import do not survive the fork. A fixed hash seed
# makes set iteration order reproducible.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class FileEnvironments:
    """Environments from `source`, FILE.py or FILE.py:CLASS; a context manager that leaves no process behind.

    An action has a timeout of `timeout` seconds. At most `num_workers` actions run at a time; the timeout of a queued
    action starts when it runs. A process that hangs or dies fails only its own episode.
    """

    def __init__(self, source: str, *, timeout: float, num_workers: int) -> None:
        self._source, self._timeout, self._num_workers = source, timeout, num_workers
        # Not yet seen by the thread. deque.append and popleft are atomic, so no lock is needed. A bare number means
        # "drop this process".
        self._orders: deque[Order | int] = deque()
        self._mailbox = Mailbox()
        self._is_closed = False

    def __enter__(self) -> Self:
        """Load the file in the fork server.

        Raises:
            UsageError: the file does not exist, fails to load, or has no valid environment class.
        """
        path, _ = file_and_name(self._source)
        if path.is_dir():
            raise UsageError(f"--environment {self._source} is a folder: pass a file in it, {path / 'FILE.py'}")
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
        # Writing a byte to the button wakes the thread from `select`.
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
        """End all processes. Each `close` method has the same timeout as an action."""
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
        """Raise UsageError if `reset` requires a column that is missing from `columns`."""
        problem = self._columns.missing(columns)
        if problem is not None:
            raise UsageError(f"--environment {self._source}: {self._class_name} {problem}")

    def send(self, episode: int, action: Action) -> None:
        """Send an action to an episode's environment. `Reset` starts the process."""
        # Encode first: a row that is not JSON must fail before the episode is registered.
        line = action_line(action)
        if isinstance(action, Reset):
            self._drop(episode)
        self._orders.append(Order(self._mailbox.ask(episode, action), line, method_names(action)))
        self._ring()

    def collect(self, timeout: float | None = None) -> list[tuple[int, Reply]]:
        """Return replies since the last call, with their episodes. Waits up to `timeout` seconds for the first one.

        Returns immediately if no action is pending.

        Raises:
            ProcessDied: the fork server has exited.
        """
        return self._mailbox.collect(timeout)

    def end(self, episode: int) -> None:
        """End an episode's process and discard the pending reply.

        The `close` method is called unless an action is in progress.
        """
        self._drop(episode)
        self._ring()

    def _drop(self, episode: int) -> None:
        number = self._mailbox.drop(episode)
        if number is not None:
            self._orders.append(number)

    def _load(self) -> ClassFacts:
        """Have the fork server load the file, and return the facts about the class."""
        channel, deadline = self._server.socket, time.monotonic() + LOAD_LIMIT
        channel.sendall(json.dumps([self._source]).encode() + b"\n")
        received = b""
        while not received.endswith(b"\n"):
            # settimeout(0) would mean non-blocking, hence the minimum.
            channel.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = channel.recv(1 << 16)
            except TimeoutError:
                raise UsageError(f"--environment {self._source} did not load within {LOAD_LIMIT:g} s") from None
            if not data:
                raise UsageError(f"--environment {self._source} {self._server.last_words()} while it was loading")
            received += data
        answer = json.loads(received)
        if "value" not in answer:
            if answer["trace"]:
                logger.warning("%s %s\n%s", self._source, answer["reason"], answer["trace"])
            raise UsageError(f"--environment {self._source} {answer['reason']}")
        facts = cast(ClassFacts, answer["value"])
        return facts | {"columns": ResetColumns(**answer["value"]["columns"])}

    def _ring(self) -> None:
        # The buffer is full, so the bell is already ringing; or the run is closing.
        with contextlib.suppress(BlockingIOError, OSError):
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
        # The next `send` or `collect` raises it in the owner's thread.
        except BaseException as defect:
            self._mailbox.break_down(defect)
        finally:
            processes.close()
