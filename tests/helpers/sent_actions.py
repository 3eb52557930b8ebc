"""Environments whose actions a test sends and whose replies it collects, without an event loop of its own."""

import asyncio
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from rlhf_cli.agents.records import Action, Reply
from rlhf_cli.event_loop import LoopThread


class SentActions:
    """Mixin before a class of environments."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._asking = LoopThread("test")
        self._pending: dict[Future[Reply], int] = {}

    def send(self, episode: int, action: Action) -> None:
        future = asyncio.run_coroutine_threadsafe(self._answered(episode, action), self._asking.loop)
        self._pending[future] = episode

    def collect(self, timeout: float | None = None) -> list[tuple[int, Reply]]:
        """Return new replies; waits up to `timeout` seconds for the first one, unless none is pending."""
        done, _ = wait(self._pending, timeout, FIRST_COMPLETED)
        return [(self._pending.pop(future), future.result()) for future in done]

    def end(self, episode: int) -> None:
        pending = [future for future, other in self._pending.items() if other == episode]
        for future in pending:
            del self._pending[future]
            future.cancel()
        if not pending:
            super().end(episode)  # type: ignore[misc]

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        self._asking.end(lambda: asyncio.sleep(0))

    async def _answered(self, episode: int, action: Action) -> Reply:
        try:
            return await self.answer(episode, action)  # type: ignore[attr-defined,no-any-return]
        except asyncio.CancelledError:
            super().end(episode)  # type: ignore[misc]
            raise
