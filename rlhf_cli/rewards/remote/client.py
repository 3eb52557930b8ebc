"""Rewards from one or several HTTP servers, asked in the background.

Responses wait in one line and each server takes batches from it as fast as it answers. A server whose call failed is
left out until it answers a probe again; its requests go to another server. Runs an event loop in a thread of its
own. The wire format is in call.py; scorer.py adds up the scores.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from types import TracebackType
from typing import Self

import aiohttp

from rlhf_cli.errors import UsageError
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.remote.call import (
    CallFailed,
    RequestRefused,
    ServerBusy,
    UnfitBatch,
    post_batch,
    probe,
    reward_session,
    takes_images,
)
from rlhf_cli.rewards.remote.state import RewardServer, WaitingItem
from rlhf_cli.rewards.workers.pool import Failure, ItemOutcome

logger = logging.getLogger(__name__)

CALLS_PER_SERVER = 2
"""Batches at a server at the same time: one is on its way while the other is computed."""


class RemoteRewards:
    """The reward servers of a run; a context manager that owns the thread that asks them.

    `timeout` are the seconds a call may take. A response is asked about again `retries` times after a call with it
    failed, by another server if there is one. If no server could be reached for `timeout` seconds, all waiting
    responses fail. `tell` is called, in a thread of its own, with a sentence about a server that goes or comes back; it
    is in the log besides.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str | None,
        timeout: float,
        retries: int,
        batch_size: int,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._servers = [RewardServer(url) for url in urls]
        self._tell = tell
        self._key, self._timeout, self._retries, self._batch_size = key, timeout, retries, batch_size
        self._waiting: deque[WaitingItem] = deque()
        self._is_given_up = False
        self._giving_up: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._thread = LoopThread("remote-rewards")
        self._main = self._thread.run(self._begin())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Break off all calls and end the thread; rewards that are still waited for fail."""
        self._thread.end(self._end_main)

    def submit(self, requests: Sequence[ScoreRequest]) -> "list[Future[ItemOutcome]]":
        """Begin to ask about responses; each outcome comes when it is there. No failure is raised."""
        assert not self._main.done(), "the task that asks reward servers has ended"
        items = [WaitingItem(request, Future()) for request in requests]
        self._thread.call_soon(self._enqueue, items)
        return [item.future for item in items]

    def feed(self) -> "RemoteFeed":
        """Return the responses that arrive bit by bit."""
        return RemoteFeed(self)

    async def _begin(self) -> "asyncio.Task[None]":
        main = asyncio.create_task(self._serve())
        main.add_done_callback(self._leave_nobody_waiting)
        return main

    async def _end_main(self) -> None:
        self._main.cancel()
        await asyncio.wait({self._main})

    def _leave_nobody_waiting(self, main: "asyncio.Task[None]") -> None:
        while self._waiting:
            self._waiting.popleft().end(ItemOutcome(failure=Failure("crashed", "was not waited for any longer")))
        if not main.cancelled() and (defect := main.exception()) is not None:
            logger.error("reward servers are not asked any longer", exc_info=defect)

    async def _serve(self) -> None:
        async with reward_session(self._key) as session, asyncio.TaskGroup() as tasks:
            for server in self._servers:
                tasks.create_task(self._watch(server, session))
                for _ in range(CALLS_PER_SERVER):
                    tasks.create_task(self._ask(server, session))

    async def _watch(self, server: RewardServer, session: aiohttp.ClientSession) -> None:
        """Probe a server that is left out, until it is there again."""
        while True:
            await self._until(lambda: server.is_away and not server.is_blind)
            await asyncio.sleep(server.absence)
            try:
                await probe(session, server.url, timeout=self._timeout)
            except CallFailed as error:
                server.failures += 1
                server.last = error.failure
            else:
                self._take_in(server)

    async def _ask(self, server: RewardServer, session: aiohttp.ClientSession) -> None:
        """Ask a server about batch after batch."""
        while True:
            await self._until(lambda: self._has_work(server))
            await asyncio.sleep(server.busy_until - time.monotonic())
            batch = self._take_batch(server)
            if not batch:
                continue
            try:
                if await self._is_blind_beside_others(server, session, batch):
                    self._leave_blind_out(server)
                    self._put_back(batch)
                    continue
                outcomes = await self._outcomes(server, session, [item.request for item in batch])
            except ServerBusy as busy:
                self._postpone(server, batch, busy)
            except UnfitBatch as error:
                self._take_apart(server, batch, error)
            except RequestRefused as error:
                self._refuse(server, batch, error.failure)
            except CallFailed as error:
                self._leave_out(server, error.failure)
                self._try_again(server, batch, [error.failure] * len(batch), counts=error.counts)
            except BaseException:  # this is the end of the task, which must leave nobody waiting
                self._waiting.extend(batch)
                raise
            else:
                server.failures = 0
                self._settle(server, batch, outcomes)

    async def _outcomes(
        self, server: RewardServer, session: aiohttp.ClientSession, requests: Sequence[ScoreRequest]
    ) -> list[ItemOutcome]:
        """Return what a server answers about a batch, with its pictures if the server takes some."""
        with_images = bool(server.takes_images) and any(request.pictures for request in requests)
        return await post_batch(session, server.url, requests, timeout=self._timeout, with_images=with_images)

    async def _is_blind_beside_others(
        self, server: RewardServer, session: aiohttp.ClientSession, batch: Sequence[WaitingItem]
    ) -> bool:
        """Return whether a server would judge prompts without the pictures that another server sees: samples of a
        prompt must be judged alike. Raise CallFailed if the server does not answer.
        """
        if not any(item.request.pictures for item in batch):
            return False
        for other in (server, *self._servers):
            if other.takes_images is None and (other is server or not other.is_away):
                other.takes_images = await self._sees(other, session, is_needed=other is server)
        if server.takes_images or any(other.takes_images for other in self._servers):
            return not server.takes_images
        if not server.is_reported:
            server.is_reported = True
            self._say(f"the reward server {server.url} takes texts alone: it does not see the pictures of prompts")
        return False

    async def _sees(self, server: RewardServer, session: aiohttp.ClientSession, *, is_needed: bool) -> bool | None:
        """Return whether a server takes pictures; None for another server that cannot be asked now."""
        try:
            return await takes_images(session, server.url, timeout=self._timeout)
        except CallFailed:
            if is_needed:
                raise
            return None

    def _leave_blind_out(self, server: RewardServer) -> None:
        if server.is_blind:
            return
        server.is_blind = server.is_away = True
        reason = "takes texts alone beside servers that see the pictures of prompts"
        server.last = Failure("load", reason)
        self._say(f"the reward server {server.url} {reason}: it is left out")
        if all(other.is_away for other in self._servers):
            self._giving_up = self._thread.loop.call_later(self._timeout, self._give_up)
        self._news.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._news.clear()
            await self._news.wait()

    def _enqueue(self, items: Sequence[WaitingItem]) -> None:
        if self._is_given_up:
            self._fail_all(items)
            return
        self._waiting.extend(items)
        self._news.set()

    def _has_work(self, server: RewardServer) -> bool:
        return not server.is_away and any(self._is_for(item, server) for item in self._waiting)

    def _is_for(self, item: WaitingItem, server: RewardServer) -> bool:
        """Return whether this server should be asked: it did not fail with the item, or no other is left."""
        others = (other.url for other in self._servers if not other.is_away)
        return server.url not in item.tried or item.tried.issuperset(others)

    def _take_batch(self, server: RewardServer) -> list[WaitingItem]:
        """Return items from the head of the line; an item that a call has failed with goes alone, for it may be to
        blame.
        """
        batch: list[WaitingItem] = []
        left: deque[WaitingItem] = deque()
        size = 0 if server.is_away else self._batch_size
        while self._waiting and len(batch) < size:
            item = self._waiting.popleft()
            if item.future.cancelled():
                continue
            if self._is_for(item, server) and not (item.alone and batch):
                batch.append(item)
                size = 1 if item.alone else size
            else:
                left.append(item)
        self._waiting.extendleft(reversed(left))
        return batch

    def _settle(self, server: RewardServer, batch: Sequence[WaitingItem], outcomes: Sequence[ItemOutcome]) -> None:
        failed = [(item, outcome.failure) for item, outcome in zip(batch, outcomes, strict=True) if outcome.failure]
        for item, outcome in zip(batch, outcomes, strict=True):
            if outcome.failure is None:
                item.end(outcome)
        self._try_again(server, [item for item, _ in failed], [failure for _, failure in failed])

    def _try_again(
        self, server: RewardServer, batch: Sequence[WaitingItem], failures: Sequence[Failure], *, counts: bool = True
    ) -> None:
        """Put items back at the head of the line, or fail the items that were tried often enough."""
        again = []
        for item, failure in zip(batch, failures, strict=True):
            item.tries += counts
            item.alone |= counts
            item.tried.add(server.url)
            if item.tries > self._retries:
                item.end(ItemOutcome(failure=_naming(server, failure)))
            else:
                again.append(item)
        self._put_back(again)

    def _refuse(self, server: RewardServer, batch: Sequence[WaitingItem], failure: Failure) -> None:
        """Give items that a server refused to servers that have not seen them, or fail them: it would refuse again."""
        if not server.is_refusing:
            server.is_refusing = True
            self._say(f"the reward server {server.url} {failure.reason}: requests that it refuses are not repeated")
        again = []
        for item in batch:
            item.tried.add(server.url)
            if any(other.url not in item.tried and not other.is_away for other in self._servers):
                again.append(item)
            else:
                item.end(ItemOutcome(failure=_naming(server, failure)))
        self._put_back(again)

    def _put_back(self, items: Sequence[WaitingItem]) -> None:
        if self._is_given_up:
            self._fail_all(items)
            return
        self._waiting.extendleft(reversed(items))
        self._news.set()

    def _postpone(self, server: RewardServer, batch: Sequence[WaitingItem], busy: ServerBusy) -> None:
        """Wait as a full server asks for; an item that found no room for `timeout` seconds has failed."""
        now = time.monotonic()
        server.busy_until = now + busy.seconds
        again = []
        for item in batch:
            item.full_since = item.full_since or now
            if now - item.full_since > self._timeout:
                failure = Failure("timeout", f"was full for {self._timeout:g} s")
                item.end(ItemOutcome(failure=_naming(server, failure)))
            else:
                again.append(item)
        self._put_back(again)

    def _take_apart(self, server: RewardServer, batch: Sequence[WaitingItem], error: UnfitBatch) -> None:
        """Send the items of a batch that the server does not take one by one; one that is alone has failed."""
        if len(batch) == 1:
            batch[0].end(ItemOutcome(failure=_naming(server, Failure("bad_result", str(error)))))
            return
        for item in batch:
            item.alone = True
        self._put_back(batch)

    def _leave_out(self, server: RewardServer, failure: Failure) -> None:
        if server.is_away:
            return
        server.is_away = True
        server.failures += 1
        server.last = failure
        consequence = "it is left out until it answers a probe"
        if all(other.is_away for other in self._servers):
            self._giving_up = self._thread.loop.call_later(self._timeout, self._give_up)
            consequence += f", and rewards fail if none does within {self._timeout:g} s"
        self._say(f"the reward server {server.url} {failure.reason}: {consequence}")
        self._news.set()

    def _take_in(self, server: RewardServer) -> None:
        server.is_away = False
        server.takes_images = None  # another server may have taken its place
        self._say(f"the reward server {server.url} answers again")
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._is_given_up = False
        self._news.set()

    def _say(self, sentence: str) -> None:
        logger.warning("%s", sentence)
        if self._tell is not None:
            with suppress(OSError):  # a terminal that is gone is no reason to stop asking
                self._tell(sentence)

    def _give_up(self) -> None:
        """Fail waiting and new items until a server is there again, because none has been there for long."""
        self._is_given_up = True
        waiting, self._waiting = list(self._waiting), deque()
        self._fail_all(waiting)

    def _fail_all(self, items: Sequence[WaitingItem]) -> None:
        failures = [_naming(server, server.last) for server in self._servers if server.last is not None]
        failure = Failure(failures[0].kind, ", ".join(each.reason for each in failures))
        for item in items:
            item.end(ItemOutcome(failure=failure))


class RemoteFeed:
    """One round of responses for the servers, like a pool's feed for its workers; a context manager.

    Ended before all is done, what waits is not asked about any more.
    """

    def __init__(self, servers: RemoteRewards) -> None:
        self._servers = servers
        self._futures: list[Future[ItemOutcome]] = []
        self._unseen: list[int] = []  # numbers of responses whose outcome was not given out yet

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in self._futures:
            future.cancel()

    def add(self, requests: Sequence[ScoreRequest]) -> None:
        """Have responses scored; they are numbered from 0. Returns at once."""
        futures = self._servers.submit(requests)
        self._unseen += range(len(self._futures), len(self._futures) + len(futures))
        self._futures += futures

    def ready(self) -> list[tuple[int, ItemOutcome]]:
        """Return the outcomes that have come since the last call, each with the number of its response. Never waits."""
        done = [number for number in self._unseen if self._futures[number].done()]
        self._unseen = sorted(set(self._unseen).difference(done))
        return [(number, self._futures[number].result()) for number in done]

    def finish(self) -> None:
        """Wait for all outcomes. No failure is raised."""
        wait(self._futures)


def _naming(server: RewardServer, failure: Failure) -> Failure:
    return Failure(failure.kind, f"{server.url} {failure.reason}", failure.trace)


def check_servers(urls: Sequence[str], *, key: str | None, timeout: float) -> None:
    """Raise UsageError, naming the silent servers, unless every server answers."""

    async def failures() -> list[BaseException | None]:
        async with reward_session(key) as session:
            probes = [probe(session, url, timeout=timeout) for url in urls]
            return await asyncio.gather(*probes, return_exceptions=True)

    wrong = [f"{url} {error}" for url, error in zip(urls, asyncio.run(failures()), strict=True) if error]
    if wrong:
        raise UsageError(f"--remote_rm_url {', '.join(wrong)}")
