"""Agent processes for a run, one per episode. The driver collects their requests and outcomes.

The endpoint and the supervision run in an event loop on a background thread, so agents continue while the driver works.
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

# The agent chooses this name: bound it in the log.
_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Started:
    """The process for an episode has started."""

    episode: int


@dataclass(frozen=True, slots=True)
class Asked:
    """An agent requests turns. Pass the ticket to `AgentPrograms.answer`."""

    episode: int
    ticket: int
    request: ChatRequest


@dataclass(frozen=True, slots=True)
class Ended:
    """The process for an episode has exited."""

    episode: int
    end: ProgramEnd


Event = Started | Asked | Ended


@dataclass(eq=False)
class _Program(Caller):
    """An agent, seen from the event loop."""

    limit: TimeLimit = field(kw_only=True)
    open: dict[int, "asyncio.Future[Completion]"] = field(default_factory=dict)
    """Pending responses by ticket."""


class AgentPrograms:
    """Runs agent processes; a context manager that leaves no process behind.

    The timeout runs from the start to the first request, and from each response to the next request or to the
    exit. It is suspended while a request is pending. At most `num_workers` processes run at a time.
    """

    def __init__(self, command: str, *, timeout: float, num_workers: int) -> None:
        """Check the command. Raises UsageError if the executable or the Python script does not exist."""
        self._words, self._command = command_words(command), command
        self._timeout, self._num_workers = timeout, num_workers
        # Ignored settings are logged once per run, not once per request.
        self._noticed: set[str] = set()

    def __enter__(self) -> Self:
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._tickets = itertools.count()
        # The event loop keeps only weak references to tasks, so hold them here.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # By open ticket.
        self._programs: dict[int, _Program] = {}
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
    def description(self) -> EnvironmentDescription:
        """Description for prompt rendering. The run sees no tools: agents declare tools in their requests."""
        return EnvironmentDescription((), f"agent program {self._command!r}", is_program=True)

    def start(self, episode: int, row: Mapping[str, object]) -> None:
        """Start the agent for an episode with the row on stdin, as soon as a slot is free."""
        self._thread.call_soon(self._begin, episode, row)

    def end(self, episode: int) -> None:
        """Kill the agent for an episode."""
        self._thread.call_soon(self._drop, episode)

    def answer(self, ticket: int, answer: Completion | Refused) -> None:
        """Answer a request. No-op if the agent has exited."""
        self._thread.call_soon(self._deliver, ticket, answer)

    def collect(self, timeout: float | None = None) -> list[Event]:
        """Return events since the last call. Waits up to `timeout` seconds for the first one.

        Raises any exception from the event loop thread.
        """
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout != 0, timeout)
            while True:
                if isinstance(event, BaseException):
                    raise event
                events.append(event)
                event = self._events.get(block=False)
        return events

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
        # A second cancellation would interrupt the cleanup in `_play` and leak the process.
        if task is not None and not task.cancelling():
            task.cancel()

    def _forget(self, episode: int, task: "asyncio.Task[None]") -> None:
        del self._tasks[episode]
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._events.put(defect)

    async def _play(self, episode: int, row: Mapping[str, object]) -> None:
        """Run one episode's agent until it exits, times out or is dropped."""
        async with self._slots:
            program = _Program(episode, limit=TimeLimit(self._timeout, now=self._loop.time()))
            variables = {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": program.key, "OPENAI_MODEL": MODEL}
            try:
                process = AgentProcess(self._words, row, variables, self._lifeline)
            # The machine is out of processes, file descriptors or memory: fail this episode, not the run.
            except OSError as error:
                self._events.put(Ended(episode, ProgramEnd(failure=f"could not be started: {error.strerror}")))
                return
            self._endpoint.admit(program)
            self._events.put(Started(episode))
            ended = self._loop.run_in_executor(self._watchers, process.wait)
            try:
                is_late = not await self._has_ended(program, ended)
            finally:
                # Order matters: reject new requests first, then kill, and free the pid (`close`) only when the watcher
                # thread has seen the exit.
                self._endpoint.dismiss(program)
                process.kill()
                # Shielded from cancellation. The wait is short, since the process was killed.
                await asyncio.shield(ended)
                end = process.close()
                self._refuse_all(program)
            late = ProgramEnd(failure=f"sent no request and did not exit within {self._timeout:g} s", trace=end.trace)
            self._events.put(Ended(episode, late if is_late else end))

    async def _has_ended(self, program: _Program, ended: "asyncio.Future[None]") -> bool:
        """Wait until an agent exits. Returns False on timeout."""
        # Requests move the deadline, so look at it again after each wait.
        while (remaining := program.limit.remaining(self._loop.time())) > 0:
            done, _ = await asyncio.wait({ended}, timeout=remaining)
            if done:
                return True
        return ended.done()

    async def _answer(self, caller: Caller, request: ChatRequest) -> Completion:
        """Pass an agent's request to the driver and wait for the response."""
        assert isinstance(caller, _Program)
        for name in request.ignored:
            if name not in self._noticed:
                self._noticed.add(name)
                written = ascii(name)[1:-1][:_LONGEST_NAME]
                logger.warning("the agent program sets %s, which is ignored: turns use the run's settings", written)
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
        # Cancelled: the client has disconnected.
        if future.done():
            return
        if isinstance(answer, Completion):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _refuse_all(self, program: _Program) -> None:
        for ticket in [*program.open]:
            self._deliver(ticket, Refused("the episode has ended", status=410))
