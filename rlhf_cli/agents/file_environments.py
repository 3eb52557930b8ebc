"""Environments defined by a class in a user's file or by a game of textarena, one process per episode.

Their code is never imported into the driver. An event loop in a background thread exchanges actions and replies with
the processes, so environments run while the caller does other work.
"""

import importlib.util
import json
import logging
import time
from collections.abc import Collection
from types import TracebackType
from typing import Self, cast

from rlhf_cli.agents.environment_class import ClassFacts, ResetColumns
from rlhf_cli.agents.episode_processes import EpisodeProcesses
from rlhf_cli.agents.records import Action, EnvironmentDescription, Reply, Reset, method_names
from rlhf_cli.agents.wire import action_line
from rlhf_cli.config.queries import HARBOR_PREFIX, TEXTARENA_PREFIX
from rlhf_cli.errors import UsageError
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.rewards.workers.child import ChildProcess
from rlhf_cli.rewards.workers.process import LOAD_LIMIT
from rlhf_cli.rewards.workers.user_module import file_and_name

logger = logging.getLogger(__name__)

_SERVER = "rlhf_cli.agents.fork_server"

# One thread per library: worker threads that a library starts on import do not survive the fork. A fixed hash seed
# makes set iteration order reproducible.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class FileEnvironments:
    """Environments from `source`, FILE.py, FILE.py:CLASS, textarena:GAME or harbor:docker.

    A context manager that leaves no process behind.

    An action has a timeout of `timeout` seconds. At most `num_workers` actions run at a time; the timeout of a queued
    action starts when it runs. A process that hangs or dies fails only its own episode.
    """

    def __init__(self, source: str, *, timeout: float, num_workers: int) -> None:
        self._source, self._timeout, self._num_workers = source, timeout, num_workers

    def __enter__(self) -> Self:
        """Load the file or game in the fork server.

        Raises:
            UsageError: the file or game does not exist, fails to load, or has no valid environment class.
        """
        origin = self._checked_origin()
        self._server = ChildProcess(_SERVER, _ENVIRONMENT)
        try:
            facts = self._load()
        except BaseException:
            self._server.kill()
            raise
        self._columns, self._class_name = facts["columns"], facts["name"]
        about = f"{facts['name']} of {origin}: {facts['about']}"
        self._description = EnvironmentDescription(tuple(facts["tools"]), about, facts["owns_reward"])
        self._thread = LoopThread("environments", on_defect=lambda defect: self._processes.break_down(defect))
        self._processes = EpisodeProcesses(
            self._server,
            self._thread.loop,
            timeout=self._timeout,
            close_seconds=self._timeout if facts["has_close"] else 0.0,
            num_workers=self._num_workers,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Each `close` method has the same timeout as an action."""
        if not self._thread.has_ended:
            self._thread.end(self._processes.close)
            self._server.kill()

    @property
    def description(self) -> EnvironmentDescription:
        return self._description

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise UsageError if `reset` requires a column that is missing from `columns`."""
        problem = self._columns.missing(columns)
        if problem is not None:
            raise UsageError(f"--environment {self._source}: {self._class_name} {problem}")

    async def answer(self, episode: int, action: Action) -> Reply:
        """Send an action to an episode's environment, and wait for the reply. `Reset` starts the process.

        Raises:
            ProcessDied: the fork server has exited.
        """
        # Encode first: a row that is not JSON must fail before the process starts.
        line = action_line(action)
        if isinstance(action, Reset):
            self._thread.call_soon(self._processes.drop, episode)
        return await self._thread.ask(self._processes.answer(episode, line, method_names(action)))

    def end(self, episode: int) -> None:
        """End an episode's process. The `close` method is called unless an action is in progress."""
        self._thread.call_soon(self._processes.drop, episode)

    def _checked_origin(self) -> str:
        """Return the name of the file or package. Raises UsageError if it does not exist."""
        if self._source.startswith(TEXTARENA_PREFIX):
            package = TEXTARENA_PREFIX.removesuffix(":")
            if importlib.util.find_spec(package) is None:
                raise UsageError(
                    f"--environment {self._source}: {package} is not installed: pip install 'rlhf-cli[environments]'"
                )
            return package
        if self._source.startswith(HARBOR_PREFIX):
            return self._source
        path, _ = file_and_name(self._source)
        if path.is_dir():
            raise UsageError(f"--environment {self._source} is a folder: pass a file in it, {path / 'FILE.py'}")
        if not path.is_file():
            raise UsageError(f"--environment {self._source}: there is no such file")
        return path.name

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
