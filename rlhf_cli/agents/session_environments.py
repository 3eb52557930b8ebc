"""Environments that are sessions at an external server, one session per episode.

Runs an event loop in a background thread, so `send` does not block. The `Provider` implements the server's protocol:
openenv.py or mcp_server.py.
"""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rlhf_cli.agents.mailbox import Mailbox
from rlhf_cli.agents.records import (
    Action,
    Calls,
    EnvironmentDescription,
    Finish,
    Reply,
    Reset,
    Text,
    late_reply,
    method_names,
)
from rlhf_cli.errors import UsageError
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.workers.process import LOAD_LIMIT

# For all sessions to close at the end of the run.
_END_SECONDS = 30.0


class SessionFailed(Exception):
    """A session cannot continue. The message completes a sentence about the environment."""


class Session(Protocol):
    """One episode at a server. A single task calls all methods."""

    async def answer(self, action: Reset | Calls | Text) -> Reply:
        """Answer an action. `Reset` comes first and opens the session.

        Raises SessionFailed or BadResult on failure.
        """
        ...

    async def close(self) -> None:
        """End the session in any state."""


class Provider(Protocol):
    """A type of server."""

    async def describe(self) -> EnvironmentDescription:
        """Return the server's tools. Raises SessionFailed if the server does not follow the protocol."""
        ...

    def session(self) -> Session:
        """Create a session that is not open yet. The caller enforces timeouts."""
        ...

    async def check_sessions(self, count: int) -> None:
        """Raise SessionFailed if the server does not accept `count` concurrent sessions."""


@dataclass(eq=False)
class _Episode:
    """Action queue and state for one episode."""

    actions: "asyncio.Queue[Action]" = field(default_factory=asyncio.Queue)
    is_closing: bool = False
    is_dropped: bool = False


class SessionEnvironments:
    """Environments at the server `source`; a context manager that leaves no session open.

    An action has a timeout of `timeout` seconds. At most `num_workers` actions run at a time; the timeout of a queued
    action starts when it runs. A session that hangs or breaks fails only its own episode.
    """

    def __init__(self, source: str, provider: Provider, *, timeout: float, num_workers: int) -> None:
        self._source, self._provider, self._timeout = source, provider, timeout
        self._num_workers = num_workers

    def __enter__(self) -> Self:
        """Request the tools from the server.

        Raises:
            UsageError: the server is unreachable or does not follow the protocol.
        """
        self._mailbox = Mailbox()
        self._slots = asyncio.Semaphore(self._num_workers)
        self._episodes: dict[int, _Episode] = {}
        # The event loop keeps only weak references to tasks, so hold them here.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._thread = LoopThread("environments")
        try:
            self._description = self._thread.run(asyncio.wait_for(self._provider.describe(), LOAD_LIMIT))
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                error = SessionFailed(f"did not answer within {LOAD_LIMIT:g} s")
            if isinstance(error, SessionFailed | BadResult):
                raise UsageError(f"--environment {self._source} {error}") from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all sessions."""
        self._thread.end(self._end_all)

    @property
    def description(self) -> EnvironmentDescription:
        return self._description

    def check_sessions(self, count: int) -> None:
        """Raise UsageError if the server does not accept `count` concurrent episodes."""
        try:
            asyncio.run(self._provider.check_sessions(count))
        except SessionFailed as error:
            raise UsageError(f"--environment {self._source} {error}") from None

    def send(self, episode: int, action: Action) -> None:
        """Send an action to an episode's environment. `Reset` opens the session."""
        if isinstance(action, Reset):
            self.end(episode)
        number = self._mailbox.ask(episode, action)
        self._thread.call_soon(self._hand_over, number, action)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Reply]]:
        """Return replies since the last call, with their episodes. Waits up to `timeout` seconds for the first one.

        Returns immediately if no action is pending.
        """
        return self._mailbox.collect(timeout)

    def end(self, episode: int) -> None:
        """Close an episode's session and discard the pending reply."""
        number = self._mailbox.drop(episode)
        if number is not None:
            self._thread.call_soon(self._drop, number)

    async def _end_all(self) -> None:
        for number in [*self._episodes]:
            self._drop(number)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_END_SECONDS)

    def _drop(self, number: int) -> None:
        """Close a session."""
        episode = self._episodes.pop(number)
        episode.is_dropped = True
        # Never cancel a task inside session.close(): that would leave the server's process or connection open.
        if number in self._tasks and not episode.is_closing:
            self._tasks[number].cancel()

    def _hand_over(self, number: int, action: Action) -> None:
        if isinstance(action, Reset):
            self._episodes[number] = episode = _Episode()
            self._tasks[number] = task = asyncio.create_task(self._play(number, episode))
            task.add_done_callback(lambda ended: self._forget(number, ended))
        self._episodes[number].actions.put_nowait(action)

    def _forget(self, number: int, task: "asyncio.Task[None]") -> None:
        del self._tasks[number]
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._mailbox.break_down(defect)

    async def _play(self, number: int, episode: _Episode) -> None:
        """Answer the actions of one episode. After a failure, answer each with that failure."""
        # `mcp` uses anyio cancel scopes, which must be entered and left in the same task. So one task opens, uses and
        # closes the session.
        session = self._provider.session()
        try:
            reply = await self._failure(number, session, episode)
        finally:
            episode.is_closing = True
            await session.close()
            episode.is_closing = False
        while not episode.is_dropped:
            await episode.actions.get()
            self._mailbox.deliver(number, reply)

    async def _failure(self, number: int, session: Session, episode: _Episode) -> Reply:
        """Answer actions until the first failure and return it."""
        action = None
        try:
            while True:
                action = await episode.actions.get()
                reply = await self._reply(session, action)
                self._mailbox.deliver(number, reply)
                if reply.failure is not None:
                    return reply
                action = None
        # When a connection breaks, `mcp` cancels the task that uses it, even between actions. Only a drop is a
        # cancellation to pass on.
        except asyncio.CancelledError:
            if episode.is_dropped:
                raise
            reply = Reply(failure="dropped the connection")
            if action is not None:
                self._mailbox.deliver(number, reply)
            return reply

    async def _reply(self, session: Session, action: Action) -> Reply:
        # Servers have no end-of-episode method, so this needs no slot.
        if isinstance(action, Finish):
            return Reply(is_done=True)
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout):
                    return await session.answer(action)
            except TimeoutError:
                return late_reply(self._timeout, method_names(action))
            except (SessionFailed, BadResult) as error:
                return Reply(failure=str(error))
