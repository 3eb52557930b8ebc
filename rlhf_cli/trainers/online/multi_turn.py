"""Multi-turn episodes: rollout engines whose response is an episode, played by a coroutine.

A `_Player` is the other side of the episodes: environments (environment_player.py) or agent programs
(program_player.py). It awaits each turn of the policy, and this engine gathers the turns that episodes wait for.

Loop, algorithms and packing do not depend on turns: a response is the tokens of all turns with the observations between
them, and `Generation.turns` marks sampled tokens. Tokens are never retokenized: a turn's prompt is all previous tokens
plus the observation's tokens.

Synchronized turns (`in_step`): engines sample one batch per turn for all episodes. Batches depend only on seeds and
replies, not on timing, so equal runs are bit-identical on a CPU. Asynchronous turns: an episode's next turn joins the
engines' batch as soon as it is wanted. Turns do not wait for other episodes, but rounding depends on the turns that
share a batch.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.trainers.online.interfaces import TurnEngines

_LOOK_SECONDS = 0.01  # interval for turns that join the engines' batch
# A short delay lets turns of fast episodes share a batch, whose start is expensive, without delaying slow ones much.
_GRACE_SECONDS = 0.1  # time that a turn waits for busy episodes while engines rest


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode: model turns, and total tokens including the prompt."""

    max_turns: int
    max_len: int

    @property
    def max_characters(self) -> int:
        """Number of characters that exceed `max_len` tokens, to refuse a text without tokenizing it."""
        return 16 * self.max_len  # above any tokenizer's ratio, except for long runs of spaces


SampleTurn = Callable[[GenerationRequest, SamplingParams], Awaitable[Generation]]
"""Samples a turn of an episode. The engine takes the calls of an episode in order."""


class _Player(Protocol):
    """The other side of the episodes. Episodes have names that are unique in a run."""

    async def play(
        self, episode: int, request: GenerationRequest, sampling: SamplingParams, sample: SampleTurn
    ) -> Generation:
        """Play an episode. Returns the response. A dropped episode is cancelled, and must not wait any more."""
        ...

    def length(self, episode: int) -> int:
        """Return the number of response tokens so far in the longest branch, 0 before the start."""
        ...

    def is_busy(self, episode: int) -> bool:
        """Return whether an episode that waits for no turn computes, rather than waits for a free process."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A turn to sample. The future gets it."""

    episode: int
    request: GenerationRequest
    sampling: SamplingParams
    future: "asyncio.Future[Generation]"
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Episode:
    """An unfinished episode, and the turns that it waits for."""

    task: "asyncio.Task[None]"
    turns: list[_Turn] = field(default_factory=list)


class MultiTurnEngines:
    """Rollout engines with one episode per response. Use a batch in one event loop, which also runs its episodes."""

    def __init__(self, engines: TurnEngines, player: _Player, *, in_step: bool) -> None:
        self._engines = engines
        self._player = player
        self._in_step = in_step
        # By name, until they end. Holds the tasks, because the event loop keeps only weak references.
        self._episodes: dict[int, _Episode] = {}
        self._finished: list[tuple[int, Generation]] = []  # by request number
        self._failure: Exception | None = None
        self._max_tokens: int | None = None
        # Request numbers restart at 0 in each batch, unlike names, which are never reused: a late turn of a dropped
        # episode must not reach one in the next batch.
        self._first = 0
        self._num_started = 0
        self._wanted: list[_Turn] = []
        self._asked: list[_Turn] = []  # in the order of the engines' batch
        self._sampling: SamplingParams | None = None  # of the engines' batch, None before the first one
        self._news = asyncio.Event()

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start an episode for each request."""
        self._drop_all()
        # An event belongs to the first event loop that waits for it.
        self._news = asyncio.Event()
        self._max_tokens = self._sampling = None
        self._first, self._num_started = self._num_started, self._num_started + len(requests)
        for name, request in enumerate(requests, start=self._first):
            self._episodes[name] = _Episode(asyncio.create_task(self._play(name, request, sampling)))

    @property
    def is_generating(self) -> bool:
        """Whether episodes in the batch are pending, or engines still sample turns of dropped ones."""
        return bool(self._episodes or self._finished or self._failure or self._engines.is_generating)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return newly finished episodes with request numbers.

        Waits for at least one, at most `timeout` seconds. Raises the error of an episode that failed.
        """
        # Use a deadline, because `_advance` may return early several times.
        end = None if timeout is None else time.monotonic() + timeout
        while self.is_generating and not (self._finished or self._failure):
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                break
            await self._advance(left)
        if self._failure is not None:
            failure = self._failure
            self._drop_all()
            raise failure
        # Swap before returning, so that an episode is returned only once.
        finished, self._finished = self._finished, []
        return finished

    def cut(self, max_tokens: int) -> None:
        """Drop episodes with responses that exceed `max_tokens`.

        With `in_step` they stay until no other episode is left, because batch composition affects the others' rounding.
        """
        self._max_tokens = max_tokens
        self._give_up_long()

    def wake_cache(self) -> None:
        """Prepare to generate."""
        self._engines.wake_cache()

    def sleep(self) -> None:
        """Drop remaining episodes, and release the GPUs."""
        self._drop_all()
        self._engines.sleep()

    def receive_weights(self, version: int) -> dict[str, float]:
        """Load the actor's current weights. Returns transfer metrics."""
        return self._engines.receive_weights(version)

    async def _play(self, name: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        try:
            found = await self._player.play(name, request, sampling, partial(self._sample, name))
            # After the await, because `collect` replaces the list.
            self._finished.append((name - self._first, found))
        except Exception as failure:
            self._failure = self._failure or failure
        self._leave(name)
        self._news.set()

    def _sample(self, name: int, request: GenerationRequest, sampling: SamplingParams) -> "asyncio.Future[Generation]":
        turn = _Turn(name, request, sampling, asyncio.get_running_loop().create_future())
        self._episodes[name].turns.append(turn)
        self._wanted.append(turn)
        self._news.set()
        return turn.future

    async def _advance(self, timeout: float | None) -> None:
        """Start turns, then wait briefly for engines and episodes."""
        patience = self._patience()
        if patience == 0.0:
            self._begin_turns()
        if self._engines.is_generating:
            for place, sampled in await self._engines.collect(_LOOK_SECONDS):
                turn = self._asked[place]
                episode = self._episodes.get(turn.episode)
                # None: it was dropped, or is of a batch before.
                if episode is not None:
                    episode.turns.remove(turn)
                    # Done: the player has cancelled it.
                    if not turn.future.done():
                        turn.future.set_result(sampled)
            # The episodes take their turns.
            await asyncio.sleep(0)
        else:
            waits = [seconds for seconds in (patience, timeout) if seconds is not None]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(waits, default=None)):
                    await self._news.wait()
        self._news.clear()
        self._give_up_long()

    def _patience(self) -> float | None:
        """Return how long to wait before wanted turns begin; None until there is news."""
        if not self._wanted:
            return None
        if self._in_step:
            is_complete = len(self._wanted) == len(self._episodes) and not self._engines.is_generating
            return 0.0 if is_complete else None
        # While engines generate, new turns can join at once.
        if self._engines.is_generating:
            return 0.0
        # If nobody computes, no other turn can follow.
        is_any_busy = any(not one.turns and self._player.is_busy(name) for name, one in self._episodes.items())
        return max(0.0, self._wanted[0].since + _GRACE_SECONDS - time.monotonic()) if is_any_busy else 0.0

    def _begin_turns(self) -> None:
        """Send turns with equal sampling parameters to the engines. Others wait for the end of the batch."""
        # The oldest turn selects the parameters, so that no turn waits indefinitely.
        sampling = self._wanted[0].sampling
        joins = sampling == self._sampling and not self._in_step
        if self._engines.is_generating and not joins:
            return
        # Sort by name: with `in_step`, the batch order must not depend on which environment replied first.
        chosen = sorted((turn for turn in self._wanted if turn.sampling == sampling), key=lambda turn: turn.episode)
        self._wanted = [turn for turn in self._wanted if turn.sampling != sampling]
        requests = [turn.request for turn in chosen]
        if joins:
            self._asked += chosen
            self._engines.add(requests)
            return
        # The first batch has no prefixes in the cache, so it can be balanced freely over engines. Later turns go to the
        # engine that has the prefix of their episode.
        continues = self._sampling is not None
        self._asked, self._sampling = chosen, sampling
        self._engines.begin(requests, replace(sampling, continues=continues))

    def _give_up_long(self) -> None:
        most = self._max_tokens
        if most is None:
            return
        too_long = [name for name in self._episodes if self._player.length(name) > most]
        # Removing an episode from a running batch would change the rounding of the others.
        if self._in_step and len(too_long) < len(self._episodes):
            return
        self._finished = [(number, found) for number, found in self._finished if found.longest <= most]
        for name in too_long:
            self._drop(name)

    def _drop_all(self) -> None:
        self._finished, self._failure = [], None
        # Copy the keys: `_drop` removes entries.
        for name in [*self._episodes]:
            self._drop(name)

    def _drop(self, name: int) -> None:
        self._episodes[name].task.cancel()
        self._leave(name)

    def _leave(self, name: int) -> None:
        """Forget an episode and the turns that it waits for."""
        for turn in self._episodes.pop(name).turns:
            turn.future.cancel()
        self._wanted = [turn for turn in self._wanted if turn.episode != name]
        # No episode needs the running turns any more.
        if not self._episodes and self._engines.is_generating:
            self._engines.cut(0)
