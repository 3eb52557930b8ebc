"""The agent programs of a run: one process an episode, whose requests and ends the driver collects.

Runs an event loop in a thread of its own, with the endpoint in it, so that programs work while the driver does
something else.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rlhf_cli.agents.agent_command import command_words
from rlhf_cli.agents.agent_process import AgentProcess, ProgramEnd
from rlhf_cli.agents.chat_records import ChatRequest, Completion, Refused
from rlhf_cli.agents.chat_responses import MODEL
from rlhf_cli.agents.endpoint import Caller, Endpoint
from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.agents.time_limit import TimeLimit
from rlhf_cli.event_loop import LoopThread

logger = logging.getLogger(__name__)

_LONGEST_NAME = 80  # of a program's setting in a warning


@dataclass(frozen=True, slots=True)
class Started:
    """The process of an episode runs from now on."""

    episode: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A program waits for turns; the answer goes to the ticket."""

    episode: int
    ticket: int
    request: ChatRequest


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of an episode is gone."""

    episode: int
    end: ProgramEnd


Event = Started | Asked | Ended


@dataclass(eq=False)
class _Program(Caller):
    """A program as its event loop sees it."""

    limit: TimeLimit = field(kw_only=True)
    open: dict[int, "asyncio.Future[Completion]"] = field(default_factory=dict)
    """The answers that it waits for, by ticket."""


class AgentPrograms:
    """Programs of a command; a context manager that leaves no process behind.

    A program may take `timeout` seconds from its start to its first request, and from an answer to the next request or
    its end, while no other request of it waits; at most `num_workers` processes run at a time.
    """

    def __init__(self, command: str, *, timeout: float, num_workers: int) -> None:
        """Check the command. Raise UsageError if there is no such program, or not the file that Python is to run."""
        self._words, self._command = command_words(command), command
        self._timeout, self._num_workers = timeout, num_workers
        self._noticed: set[str] = set()  # settings that were reported

    def __enter__(self) -> Self:
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._tickets = itertools.count()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._programs: dict[int, _Program] = {}  # by ticket that is open
        self._lifeline, self._held = os.pipe()
        self._slots = asyncio.Semaphore(self._num_workers)
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
        """End all programs and the endpoint."""
        if self._thread.has_ended:
            return
        self._thread.end(self._end_all)
        self._watchers.shutdown()
        os.close(self._lifeline)
        os.close(self._held)

    @property
    def description(self) -> EnvironmentDescription:
        """The facts that prompts need: a program has its tools for itself."""
        return EnvironmentDescription((), f"agent program {self._command!r}", is_program=True)

    def start(self, episode: int, row: Mapping[str, object]) -> None:
        """Start the program of an episode, as soon as there is room for it, with its row on the standard input."""
        self._thread.call_soon(self._begin, episode, row)

    def end(self, episode: int) -> None:
        """Kill the program of that episode, whatever it does."""
        self._thread.call_soon(self._drop, episode)

    def answer(self, ticket: int, answer: Completion | Refused) -> None:
        """Answer a request; no harm if its program is gone."""
        self._thread.call_soon(self._deliver, ticket, answer)

    def collect(self, timeout: float | None = None) -> list[Event]:
        """Return the events since the last call. Wait for one, at most `timeout` seconds.

        Raises whatever broke the event loop's work.
        """
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout != 0, timeout)
            while True:
                if isinstance(event, BaseException):
                    raise event
                found.append(event)
                event = self._events.get(block=False)
        return found

    async def _end_all(self) -> None:
        for episode in [*self._tasks]:
            self._drop(episode)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._endpoint.close()

    def _begin(self, episode: int, row: Mapping[str, object]) -> None:
        self._tasks[episode] = task = self._loop.create_task(self._play(episode, row))
        task.add_done_callback(lambda ended: self._forget(episode, ended))

    def _drop(self, episode: int) -> None:
        task = self._tasks.get(episode)
        if task is not None and not task.cancelling():  # a second interruption would break off the end of its process
            task.cancel()

    def _forget(self, episode: int, task: "asyncio.Task[None]") -> None:
        del self._tasks[episode]
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._events.put(defect)

    async def _play(self, episode: int, row: Mapping[str, object]) -> None:
        """Run the program of one episode to its end."""
        async with self._slots:
            program = _Program(episode, limit=TimeLimit(self._timeout, now=self._loop.time()))
            variables = {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": program.key, "OPENAI_MODEL": MODEL}
            try:
                process = AgentProcess(self._words, row, variables, self._lifeline)
            except OSError as error:  # no more processes, files or memory
                self._events.put(Ended(episode, ProgramEnd(failure=f"could not be started: {error.strerror}")))
                return
            self._endpoint.admit(program)
            self._events.put(Started(episode))
            ended = self._loop.run_in_executor(self._watchers, process.wait)
            try:
                is_late = not await self._has_ended(program, ended)
            finally:
                self._endpoint.dismiss(program)
                process.kill()
                await asyncio.shield(ended)  # a killed process ends at once
                end = process.close()
                self._refuse_all(program)
            late = ProgramEnd(failure=f"neither asked nor ended within {self._timeout:g} s", trace=end.trace)
            self._events.put(Ended(episode, late if is_late else end))

    async def _has_ended(self, program: _Program, ended: "asyncio.Future[None]") -> bool:
        """Wait for the end of a program; return False if it takes too long without a request."""
        while (remaining := program.limit.remaining(self._loop.time())) > 0:
            done, _ = await asyncio.wait({ended}, timeout=remaining)
            if done:
                return True
        return ended.done()

    async def _answer(self, caller: Caller, request: ChatRequest) -> Completion:
        """Pass a program's request to the driver and wait for its answer."""
        assert isinstance(caller, _Program)
        for name in request.ignored:
            if name not in self._noticed:
                self._noticed.add(name)
                written = ascii(name)[1:-1][:_LONGEST_NAME]
                logger.warning("the agent program sets %s; turns are sampled by the settings of the run", written)
        ticket = next(self._tickets)
        answer: asyncio.Future[Completion] = self._loop.create_future()
        caller.open[ticket] = answer
        caller.limit.ask(self._loop.time())
        self._programs[ticket] = caller
        self._events.put(Asked(caller.episode, ticket, request))
        return await answer

    def _deliver(self, ticket: int, answer: Completion | Refused) -> None:
        program = self._programs.pop(ticket, None)
        if program is None:
            return
        future = program.open.pop(ticket)
        program.limit.answer(self._loop.time(), is_refused=isinstance(answer, Refused))
        if future.done():
            return  # the connection is gone
        if isinstance(answer, Completion):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _refuse_all(self, program: _Program) -> None:
        for ticket in [*program.open]:
            self._deliver(ticket, Refused("the episode has ended", status=410))
