"""Environments that are sessions at an external server, one session per episode.

An event loop in a background thread runs the sessions. The `Provider` implements the server's protocol: openenv.py or
mcp_server.py.
"""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from rlhf_cli.agents.records import (
    Action,
    EnvironmentDescription,
    Reply,
    Reset,
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


class _Session(Protocol):
    """One episode at a server. A single task calls all methods."""

    async def answer(self, action: Action) -> Reply:
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

    def session(self) -> _Session:
        """Create a session that is not open yet. The caller enforces timeouts."""
        ...

    async def check_sessions(self, count: int) -> None:
        """Raise SessionFailed if the server does not accept `count` concurrent sessions."""


@dataclass(eq=False)
class _Episode:
    """Actions with the futures of their replies, and state of one episode."""

    actions: "asyncio.Queue[tuple[Action, asyncio.Future[Reply]]]" = field(default_factory=asyncio.Queue)
    task: "asyncio.Task[None]" = field(init=False)
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
        self._slots = asyncio.Semaphore(self._num_workers)
        self._episodes: dict[int, _Episode] = {}
        # The event loop keeps only weak references to tasks, so hold them here until their sessions are closed.
        self._tasks: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None
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

    async def answer(self, episode: int, action: Action) -> Reply:
        """Send an action to an episode's environment, and wait for the reply. `Reset` opens the session."""
        return await self._thread.ask(self._answer(episode, action))

    def end(self, episode: int) -> None:
        """Close an episode's session and discard the pending reply."""
        self._thread.call_soon(self._drop, episode)

    async def _end_all(self) -> None:
        for name in [*self._episodes]:
            self._drop(name)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_END_SECONDS)

    def _drop(self, name: int) -> None:
        """Close an episode's session, if it has one."""
        episode = self._episodes.pop(name, None)
        if episode is None:
            return
        episode.is_dropped = True
        # Never cancel a task inside session.close(): that would leave the server's process or connection open.
        if not episode.is_closing:
            episode.task.cancel()

    async def _answer(self, name: int, action: Action) -> Reply:
        if self._defect is not None:
            raise self._defect
        if isinstance(action, Reset):
            self._drop(name)
            self._episodes[name] = episode = _Episode()
            episode.task = asyncio.create_task(self._play(episode))
            self._tasks.add(episode.task)
            episode.task.add_done_callback(self._forget)
        episode = self._episodes[name]
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        episode.actions.put_nowait((action, reply))
        either: set[asyncio.Future[Any]] = {reply, episode.task}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            episode.task.result()  # raises a defect
            reply.cancel()  # the episode was dropped
        return reply.result()

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._defect = defect

    async def _play(self, episode: _Episode) -> None:
        """Answer the actions of one episode. After a failure, answer each with that failure."""
        # `mcp` uses anyio cancel scopes, which must be entered and left in the same task. So one task opens, uses and
        # closes the session.
        session = self._provider.session()
        try:
            failure = await self._failure(session, episode)
        finally:
            episode.is_closing = True
            await session.close()
            episode.is_closing = False
        while not episode.is_dropped:
            _, reply = await episode.actions.get()
            reply.set_result(failure)

    async def _failure(self, session: _Session, episode: _Episode) -> Reply:
        """Answer actions until the first failure and return it."""
        reply = None
        try:
            while True:
                action, reply = await episode.actions.get()
                found = await self._reply(session, action)
                reply.set_result(found)
                if found.failure is not None:
                    return found
                reply = None
        # When a connection breaks, `mcp` cancels the task that uses it, even between actions. Only a drop is a
        # cancellation to pass on.
        except asyncio.CancelledError:
            if episode.is_dropped:
                raise
            found = Reply(failure="dropped the connection")
            if reply is not None:
                reply.set_result(found)
            return found

    async def _reply(self, session: _Session, action: Action) -> Reply:
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout):
                    return await session.answer(action)
            except TimeoutError:
                return late_reply(self._timeout, method_names(action))
            except (SessionFailed, BadResult) as error:
                return Reply(failure=str(error))
