"""Reward server client with load balancing and failover, in a background thread.

All servers pull batches from one shared queue, so faster servers score more. If a call fails, the server is skipped
until it passes a health check, and its requests go to another server. The wire format is in call.py, that of judges in
rewards/judge/; scorer.py sums the rewards.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Self

import aiohttp

from rlhf_cli.errors import UsageError
from rlhf_cli.event_loop import LoopThread
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
from rlhf_cli.rewards.remote.state import Request, RewardServer, WaitingItem, Wire
from rlhf_cli.rewards.workers.pool import Failure, ItemOutcome

logger = logging.getLogger(__name__)

# Two calls per server: one is in transit while the other is scored.
REWARD_SERVERS = Wire("reward server", 2, post_batch, probe, takes_images)
"""Servers that score responses."""


class RemoteRewards:
    """Client for all reward servers in a run, or all judges; a context manager that owns the background thread.

    - `wire`: format of the calls.
    - `timeout`: seconds per call. If no server has been available for this long, all queued responses fail.
    - `retries`: tries per response after a failed call, on another server if possible.
    - `tell`: called from the background thread with a sentence when a server fails or recovers. Also logged.
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
        wire: Wire = REWARD_SERVERS,
    ) -> None:
        self._wire = wire
        self._servers = [RewardServer(url) for url in urls]
        self._tell = tell
        self._key, self._timeout, self._retries, self._batch_size = key, timeout, retries, batch_size
        # All state below belongs to the event loop thread, so it needs no lock.
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
        """Cancel all calls and stop the thread. Pending rewards fail."""
        self._thread.end(self._end_main)

    def submit(self, requests: Sequence[Request]) -> "list[Future[ItemOutcome]]":
        """Queue responses and return their futures. Failures become outcomes, never exceptions."""
        # Without the main task, nobody would resolve the futures.
        assert not self._main.done(), "the reward server task has ended"
        items = [WaitingItem(request, Future()) for request in requests]
        self._thread.call_soon(self._enqueue, items)
        return [item.future for item in items]

    def feed(self) -> "RemoteFeed":
        """Open a feed for incrementally added responses."""
        return RemoteFeed(self)

    async def _begin(self) -> "asyncio.Task[None]":
        main = asyncio.create_task(self._serve())
        main.add_done_callback(self._leave_nobody_waiting)
        return main

    async def _end_main(self) -> None:
        self._main.cancel()
        await asyncio.wait({self._main})

    def _leave_nobody_waiting(self, main: "asyncio.Task[None]") -> None:
        # A bug here must surface as failed rewards. Unresolved futures would hang the training thread.
        while self._waiting:
            self._waiting.popleft().end(ItemOutcome(failure=Failure("crashed", "was cancelled")))
        if not main.cancelled() and (defect := main.exception()) is not None:
            logger.error("the reward server client has stopped", exc_info=defect)

    async def _serve(self) -> None:
        async with reward_session(self._key) as session, asyncio.TaskGroup() as tasks:
            for server in self._servers:
                tasks.create_task(self._watch(server, session))
                for _ in range(self._wire.calls_per_server):
                    tasks.create_task(self._ask(server, session))

    async def _watch(self, server: RewardServer, session: aiohttp.ClientSession) -> None:
        """Health-check an unavailable server until it recovers."""
        while True:
            # A blind server is healthy: it is excluded for good because others support images.
            await self._until(lambda: server.is_away and not server.is_blind)
            await asyncio.sleep(server.absence)
            try:
                await self._wire.probe(session, server.url, timeout=self._timeout)
            except CallFailed as error:
                server.failures += 1
                server.last = error.failure
            else:
                self._take_in(server)

    async def _ask(self, server: RewardServer, session: aiohttp.ClientSession) -> None:
        """Send batches to one server."""
        while True:
            await self._until(lambda: self._has_work(server))
            await asyncio.sleep(server.busy_until - time.monotonic())
            batch = self._take_batch(server)
            # During the sleep, another task may have taken the items.
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
            # The task ends here: return the batch so that `_leave_nobody_waiting` resolves it.
            except BaseException:
                self._waiting.extend(batch)
                raise
            else:
                server.failures = 0
                self._settle(server, batch, outcomes)

    async def _outcomes(
        self, server: RewardServer, session: aiohttp.ClientSession, requests: Sequence[Request]
    ) -> list[ItemOutcome]:
        """Score a batch on one server, with images if the server supports them."""
        with_images = bool(server.takes_images) and any(request.pictures for request in requests)
        return await self._wire.post(session, server.url, requests, timeout=self._timeout, with_images=with_images)

    async def _is_blind_beside_others(
        self, server: RewardServer, session: aiohttp.ClientSession, batch: Sequence[WaitingItem]
    ) -> bool:
        """Return whether this server would score without images that another server supports.

        Raises CallFailed if this server does not respond.
        """
        # All samples for a prompt must be scored alike, or their advantages compare different rewards.
        if not any(item.request.pictures for item in batch):
            return False
        for other in (server, *self._servers):
            if other.takes_images is None and (other is server or not other.is_away):
                other.takes_images = await self._sees(other, session, is_needed=other is server)
        if server.takes_images or any(other.takes_images for other in self._servers):
            return not server.takes_images
        if not server.is_reported:
            server.is_reported = True
            self._say(f"the {self._wire.title} {server.url} does not support images: it scores text only")
        return False

    async def _sees(self, server: RewardServer, session: aiohttp.ClientSession, *, is_needed: bool) -> bool | None:
        """Return whether a server supports images; None if unknown and not needed now."""
        try:
            return await self._wire.takes_images(session, server.url, timeout=self._timeout)
        except CallFailed:
            if is_needed:
                raise
            return None

    def _leave_blind_out(self, server: RewardServer) -> None:
        if server.is_blind:
            return
        server.is_blind = server.is_away = True
        reason = f"does not support images, but other {self._wire.title}s do"
        server.last = Failure("load", reason)
        self._say(f"the {self._wire.title} {server.url} {reason}: it is not used")
        if all(other.is_away for other in self._servers):
            self._giving_up = self._thread.loop.call_later(self._timeout, self._give_up)
        self._news.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        # Clear before the wait, not after: no other task runs between the check and `wait`, so no news is lost.
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
        """Return whether to send an item to this server: it has not failed there, or no untried server is available."""
        others = (other.url for other in self._servers if not other.is_away)
        return server.url not in item.tried or item.tried.issuperset(others)

    def _take_batch(self, server: RewardServer) -> list[WaitingItem]:
        """Take the next batch from the queue. Items from failed calls go one by one, since each may be the cause."""
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
        """Requeue items at the front, or fail them if no retries are left."""
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
        """Pass rejected items to untried servers, or fail them. A retry here would be rejected again."""
        if not server.is_refusing:
            server.is_refusing = True
            self._say(f"the {self._wire.title} {server.url} {failure.reason}: rejected requests are not retried there")
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
        """Back off from an overloaded server. Items that were turned away for `timeout` seconds fail."""
        now = time.monotonic()
        server.busy_until = now + busy.seconds
        again = []
        for item in batch:
            item.full_since = item.full_since or now
            if now - item.full_since > self._timeout:
                failure = Failure("timeout", f"was overloaded for {self._timeout:g} s")
                item.end(ItemOutcome(failure=_naming(server, failure)))
            else:
                again.append(item)
        self._put_back(again)

    def _take_apart(self, server: RewardServer, batch: Sequence[WaitingItem], error: UnfitBatch) -> None:
        """Split a rejected batch into single items. A rejected single item fails."""
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
        consequence = "it is skipped until it passes a health check"
        if all(other.is_away for other in self._servers):
            self._giving_up = self._thread.loop.call_later(self._timeout, self._give_up)
            consequence += f"; if no server does within {self._timeout:g} s, rewards fail"
        self._say(f"the {self._wire.title} {server.url} {failure.reason}: {consequence}")
        self._news.set()

    def _take_in(self, server: RewardServer) -> None:
        server.is_away = False
        # The server may have been restarted with another reward model.
        server.takes_images = None
        self._say(f"the {self._wire.title} {server.url} is available again")
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._is_given_up = False
        self._news.set()

    def _say(self, sentence: str) -> None:
        logger.warning("%s", sentence)
        if self._tell is not None:
            # A closed terminal must not stop scoring.
            with suppress(OSError):
                self._tell(sentence)

    def _give_up(self) -> None:
        """Fail queued and new items until a server recovers."""
        self._is_given_up = True
        waiting, self._waiting = list(self._waiting), deque()
        self._fail_all(waiting)

    def _fail_all(self, items: Sequence[WaitingItem]) -> None:
        failures = [_naming(server, server.last) for server in self._servers if server.last is not None]
        failure = Failure(failures[0].kind, ", ".join(each.reason for each in failures))
        for item in items:
            item.end(ItemOutcome(failure=failure))


class RemoteFeed:
    """One scoring round on the reward servers, like `Feed` for workers; a context manager.

    On exit, queued responses are cancelled.
    """

    def __init__(self, servers: RemoteRewards) -> None:
        self._servers = servers
        self._futures: list[Future[ItemOutcome]] = []
        # Response numbers that `ready` has not returned yet.
        self._unseen: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in self._futures:
            future.cancel()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue responses, numbered from 0. Never blocks."""
        futures = self._servers.submit(requests)
        self._unseen += range(len(self._futures), len(self._futures) + len(futures))
        self._futures += futures

    def ready(self) -> list[tuple[int, ItemOutcome]]:
        """Return new outcomes as (response number, outcome) pairs. Never blocks."""
        done = [number for number in self._unseen if self._futures[number].done()]
        self._unseen = sorted(set(self._unseen).difference(done))
        return [(number, self._futures[number].result()) for number in done]

    async def finish(self) -> None:
        """Wait until all outcomes are complete."""
        await asyncio.gather(*map(asyncio.wrap_future, self._futures))


def _naming(server: RewardServer, failure: Failure) -> Failure:
    return Failure(failure.kind, f"{server.url} {failure.reason}", failure.trace)


def check_servers(urls: Sequence[str], *, key: str | None, timeout: float) -> None:
    """Health-check all servers. Raises UsageError that names the failing ones."""

    async def failures() -> list[BaseException | None]:
        async with reward_session(key) as session:
            probes = [probe(session, url, timeout=timeout) for url in urls]
            return await asyncio.gather(*probes, return_exceptions=True)

    wrong = [f"{url} {error}" for url, error in zip(urls, asyncio.run(failures()), strict=True) if error]
    if wrong:
        raise UsageError(f"--remote_rm_url {', '.join(wrong)}")
