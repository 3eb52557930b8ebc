"""The environments of a run that are sessions with a server of others: one session an episode.

Runs an event loop in a thread of its own, so `send` returns at once. The server's protocol is in the `Provider`:
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

_END_SECONDS = 30.0  # for all sessions to close at the end of the run


class SessionFailed(Exception):
    """A session cannot go on; the message completes a sentence about the environment."""


class Session(Protocol):
    """One episode at a server. All methods are called by the same task."""

    async def answer(self, action: Reset | Calls | Text) -> Reply:
        """Return the reply to an action; `Reset` comes first and opens the session.

        Raises SessionFailed or BadResult if there is none.
        """
        ...

    async def close(self) -> None:
        """End the session, whatever state it is in."""


class Provider(Protocol):
    """A kind of server."""

    async def describe(self) -> EnvironmentDescription:
        """Return the tools of the server. Raises SessionFailed if it is not understood."""
        ...

    def session(self) -> Session:
        """Return a session that is not open yet; its owner bounds the time of its actions."""
        ...

    async def check_sessions(self, count: int) -> None:
        """Raise SessionFailed if the server does not take so many sessions at the same time."""


@dataclass(eq=False)
class _Episode:
    """The actions of one episode for its task."""

    actions: "asyncio.Queue[Action]" = field(default_factory=asyncio.Queue)
    is_closing: bool = False
    is_dropped: bool = False


class SessionEnvironments:
    """Environments of `source`, a server; a context manager that leaves no session open.

    An action may take `timeout` seconds; at most `num_workers` are worked on at a time, and the clock of the others
    starts when their turn comes. A session that hangs or breaks costs its own episode alone.
    """

    def __init__(self, source: str, provider: Provider, *, timeout: float, num_workers: int) -> None:
        self._source, self._provider, self._timeout = source, provider, timeout
        self._num_workers = num_workers

    def __enter__(self) -> Self:
        """Ask the server for its tools.

        Raises:
            UsageError: the server does not answer, or is not understood.
        """
        self._mailbox = Mailbox()
        self._slots = asyncio.Semaphore(self._num_workers)
        self._episodes: dict[int, _Episode] = {}
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
        """End all sessions."""
        self._thread.end(self._end_all)

    @property
    def description(self) -> EnvironmentDescription:
        return self._description

    def check_sessions(self, count: int) -> None:
        """Raise UsageError if the server does not take so many episodes at the same time."""
        try:
            asyncio.run(self._provider.check_sessions(count))
        except SessionFailed as error:
            raise UsageError(f"--environment {self._source} {error}") from None

    def send(self, episode: int, action: Action) -> None:
        """Give the environment of that episode an action; `Reset` opens its session."""
        if isinstance(action, Reset):
            self.end(episode)
        number = self._mailbox.ask(episode, action)
        self._thread.call_soon(self._hand_over, number, action)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Reply]]:
        """Return the replies since the last call, each with its episode. Wait for one, at most `timeout` seconds.

        Returns at once if no action is on its way.
        """
        return self._mailbox.collect(timeout)

    def end(self, episode: int) -> None:
        """Close the session of that episode; its reply, if it owes one, never comes."""
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
        """Have a session closed. A session that is closing is left alone: an interruption would break that off."""
        episode = self._episodes.pop(number)
        episode.is_dropped = True
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
        """Answer the actions of one episode; after a failure with the same failure."""
        session = self._provider.session()
        try:
            reply = await self._failure(number, session, episode)
        finally:
            episode.is_closing = True
            await session.close()
            episode.is_closing = False
        while not episode.is_dropped:
            await episode.actions.get()
            self._mailbox.deliver([(number, reply)])

    async def _failure(self, number: int, session: Session, episode: _Episode) -> Reply:
        """Answer actions up to the first failure, and return it.

        The package `mcp` cancels the task that uses a connection when the connection breaks, also between actions.
        """
        action = None
        try:
            while True:
                action = await episode.actions.get()
                reply = await self._reply(session, action)
                self._mailbox.deliver([(number, reply)])
                if reply.failure is not None:
                    return reply
                action = None
        except asyncio.CancelledError:
            if episode.is_dropped:
                raise
            reply = Reply(failure="broke the connection off")
            if action is not None:
                self._mailbox.deliver([(number, reply)])
            return reply

    async def _reply(self, session: Session, action: Action) -> Reply:
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
