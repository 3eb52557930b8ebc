"""Agent processes for a run, one per episode. The caller answers their requests in its own event loop.

The endpoint and the supervision run in an event loop on a background thread, so agents continue while the driver works.
"""

import asyncio
import logging
import os
import re
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlhf_cli.agents.agent_process import AgentProcess, Process, ProgramEnd, ProgramFailed
from rlhf_cli.agents.chat_records import EPISODE_ENDED, ChatRequest, Completion, Refused
from rlhf_cli.agents.chat_responses import MODEL
from rlhf_cli.agents.endpoint import Caller, Endpoint, new_key
from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.agents.time_limit import TimeLimit
from rlhf_cli.errors import UsageError
from rlhf_cli.event_loop import LoopThread

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_ASSIGNMENT = re.compile(r"\w+=")
# Python options that consume an argument: `-c CODE`, `-m MODULE`, `-W FILTER`, `-X OPTION`.
_OPTION = re.compile(r"([cmWX])")
# With these two, Python runs no script file.
_WITHOUT_SCRIPT = "cm"

logger = logging.getLogger(__name__)

# The agent chooses this name: bound it in the log.
_LONGEST_NAME = 80


@dataclass(eq=False)
class _Program(Caller):
    """An agent, seen from the event loop. `answer` begins to answer a request in the loop of the episode."""

    answer: Callable[[ChatRequest], "asyncio.Future[Completion]"] = field(kw_only=True)
    limit: TimeLimit = field(kw_only=True)
    exit: "asyncio.Future[None]" = field(kw_only=True)


class Programs(ABC):
    """Runs agent processes; a context manager that leaves no process behind.

    The timeout runs from the start to the first request, and from each response to the next request or to the
    exit. It is suspended while a request is pending. At most `num_workers` processes run at a time.
    """

    def __init__(self, *, timeout: float, num_workers: int) -> None:
        self._timeout, self._num_workers = timeout, num_workers
        # Ignored settings are logged once per run, not once per request.
        self._noticed: set[str] = set()

    def __enter__(self) -> Self:
        self._tasks: set[asyncio.Task[object]] = set()
        # Carries no data: if the driver dies, the kernel closes the write end and kills the agents.
        self._lifeline, self._held = os.pipe()
        self._slots = asyncio.Semaphore(self._num_workers)
        # Each running agent blocks one thread in `wait`.
        self._watchers = ThreadPoolExecutor(self._num_workers, thread_name_prefix="agents")
        self._thread = LoopThread("agents")
        self._loop = self._thread.loop
        self._endpoint = Endpoint(self._answer)
        self._thread.run(self._endpoint.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all agents and stop the endpoint."""
        if self._thread.has_ended:
            return
        self._thread.end(self._end_all)
        self._watchers.shutdown()
        os.close(self._lifeline)
        os.close(self._held)

    @property
    @abstractmethod
    def about(self) -> str:
        """A line for the startup log."""

    @abstractmethod
    async def _begin(self, row: Mapping[str, object]) -> Process:
        """Return a process that plays an episode. Raises OSError or ProgramFailed if there is none."""

    @property
    def description(self) -> EnvironmentDescription:
        """Description for prompt rendering. The run sees no tools: agents declare tools in their requests."""
        return EnvironmentDescription((), self.about, is_program=True)

    async def play(
        self,
        row: Mapping[str, object],
        answer: Callable[[ChatRequest], Coroutine[object, object, Completion]],
        started: Callable[[], object],
    ) -> ProgramEnd:
        """Run an agent with the row on stdin, as soon as a slot is free. Returns how it ended; a cancel kills it.

        `started` and `answer` are called in the caller's event loop. `answer` may raise Refused.
        """
        loop = asyncio.get_running_loop()

        def begin(request: ChatRequest) -> "asyncio.Future[Completion]":
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(request), loop))

        return await self._thread.ask(self._play(row, begin, lambda: loop.call_soon_threadsafe(started)))

    async def _end_all(self) -> None:
        for task in self._tasks:
            # A second cancellation would interrupt the cleanup in `_play` and leak the process.
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._endpoint.close()

    async def _play(
        self,
        row: Mapping[str, object],
        answer: Callable[[ChatRequest], "asyncio.Future[Completion]"],
        started: Callable[[], object],
    ) -> ProgramEnd:
        """Run an agent until it exits, times out or is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        async with self._slots:
            try:
                process = await self._begin(row)
            # The machine is out of processes, file descriptors or memory: fail this episode, not the run.
            except OSError as error:
                return ProgramEnd(failure=f"could not be started: {error.strerror}")
            except ProgramFailed as error:
                return error.end
            ended = self._loop.run_in_executor(self._watchers, process.wait)
            limit = TimeLimit(self._timeout, now=self._loop.time())
            program = _Program(process.key, answer=answer, limit=limit, exit=ended)
            self._endpoint.admit(program)
            try:
                started()
                is_late = not await self._has_ended(program)
            finally:
                # Order matters: reject new requests first, then kill, and free the pid (`close`) only when the watcher
                # thread has seen the exit.
                self._endpoint.dismiss(program)
                process.kill()
                # Shielded from cancellation. The wait is short, since the process was killed.
                await asyncio.shield(ended)
                end = process.close()
            late = ProgramEnd(failure=f"sent no request and did not exit within {self._timeout:g} s", trace=end.trace)
            return late if is_late else end

    async def _has_ended(self, program: _Program) -> bool:
        """Wait until an agent exits. Returns False on timeout."""
        # Requests move the deadline, so look at it again after each wait.
        while (remaining := program.limit.remaining(self._loop.time())) > 0:
            done, _ = await asyncio.wait({program.exit}, timeout=remaining)
            if done:
                return True
        return program.exit.done()

    async def _answer(self, caller: Caller, request: ChatRequest) -> Completion:
        """Pass an agent's request to the caller of `play` and wait for the response."""
        assert isinstance(caller, _Program)
        for name in request.ignored:
            if name not in self._noticed:
                self._noticed.add(name)
                written = ascii(name)[1:-1][:_LONGEST_NAME]
                logger.warning("the agent program sets %s, which is ignored: turns use the run's settings", written)
        caller.limit.ask(self._loop.time())
        answer, is_refused = caller.answer(request), True
        try:
            either: set[asyncio.Future[Any]] = {answer, caller.exit}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            # Cancelled: the episode was dropped, and its process is about to be killed.
            if not answer.done() or answer.cancelled():
                answer.cancel()
                raise Refused(EPISODE_ENDED, status=410)
            completion, is_refused = answer.result(), False
            return completion
        finally:
            caller.limit.answer(self._loop.time(), is_refused=is_refused)


class AgentPrograms(Programs):
    """Runs a command for each episode."""

    def __init__(self, command: str, *, timeout: float, num_workers: int) -> None:
        """Check the command. Raises UsageError if the executable or the Python script does not exist."""
        super().__init__(timeout=timeout, num_workers=num_workers)
        self._words, self._command = _command_words(command), command

    @property
    def about(self) -> str:
        """A line for the startup log."""
        return f"agent program {self._command!r}"

    async def _begin(self, row: Mapping[str, object]) -> AgentProcess:
        key = new_key()
        variables = {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL}
        return AgentProcess(self._words, row, variables, self._lifeline)


def _command_words(command: str) -> list[str]:
    """Split a command into arguments.

    Raises:
        UsageError: the executable, or the script that Python would run, does not exist.
    """
    words = shlex.split(command)
    if shutil.which(words[0]) is None:
        raise UsageError(f"--agent_command {command}: program {words[0]!r} not found")
    script = _script(_without_variables(words))
    if script is not None and not Path(script).exists():
        raise UsageError(f"--agent_command {command}: file {script!r} not found")
    return words


def _without_variables(words: list[str]) -> list[str]:
    """Strip `env A=1 B=2` from a command."""
    if Path(words[0]).name != "env":
        return words
    place = next((place for place, word in enumerate(words[1:], 1) if not _ASSIGNMENT.match(word)), len(words))
    return words[place:]


def _script(words: list[str]) -> str | None:
    """Return the script that Python runs, or None for other programs."""
    # The check must never reject a valid command, so any unclear case returns None.
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    left = iter(words[1:])
    for word in left:
        if not word.startswith("-"):
            return word
        # A lone dash: Python reads code from stdin.
        if word == "-":
            return None
        # Long options differ between interpreters: PyPy's --jit consumes an argument.
        if word.startswith("--"):
            return None
        if (option := _OPTION.search(word)) is None:
            continue
        if option[1] in _WITHOUT_SCRIPT:
            return None
        # `-W error` consumes the next argument, `-Werror` does not.
        if option.end() == len(word):
            next(left, None)
    return None
