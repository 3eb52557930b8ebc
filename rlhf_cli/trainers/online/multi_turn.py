"""Rollout engines whose response takes several turns: the verbs of the engines inside, over episodes."""

import time
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.trainers.online.interfaces import TurnEngines

WAIT_SECONDS = 0.01  # for responses of the engines while others may answer too
CHARACTERS_PER_TOKEN = 16  # more than any tokenizer puts into one, but for rows of blanks


class Growing(Protocol):
    """An episode in the making."""

    @property
    def longest(self) -> int:
        """Tokens of the response so far."""
        ...


GrowingT = TypeVar("GrowingT", bound=Growing)


class MultiTurnEngines(ABC, Generic[GrowingT]):
    """Rollout engines whose response is an episode."""

    def __init__(self, engines: TurnEngines, *, in_step: bool) -> None:
        self._engines = engines
        self._in_step = in_step
        self._episodes: dict[int, GrowingT] = {}  # that are not finished, by the number of their request
        self._finished: list[tuple[int, Generation]] = []
        self._max_tokens: int | None = None
        self._first = 0  # name of the first episode of the batch, for the other side
        self._num_started = 0  # names, of all batches

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Return one episode per request, in their order."""
        self.begin(requests, sampling)
        found: dict[int, Generation] = {}
        while self.is_generating:
            found |= self.collect()
        return [found[number] for number in range(len(requests))]

    @abstractmethod
    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start an episode for each request."""

    @abstractmethod
    def _advance(self, timeout: float | None) -> None:
        """Wait a moment, at most `timeout` seconds, for turns and answers, and process them."""

    @abstractmethod
    def _drop(self, number: int) -> None:
        """Give up an episode."""

    def _name_episodes(self, count: int) -> None:
        """Give the episodes of a new batch names of their own."""
        self._max_tokens = None
        self._first, self._num_started = self._num_started, self._num_started + count

    @property
    def is_generating(self) -> bool:
        """Whether episodes of the batch are still to come."""
        return bool(self._episodes or self._finished)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return the episodes that finished since the last call, each with the number of its request.

        Waits for one, at most `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._episodes and not self._finished:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                break
            self._advance(left)
        finished, self._finished = self._finished, []
        return finished

    def cut(self, max_tokens: int) -> None:
        """Give up the episodes of the batch that have, or get, more tokens in their response.

        In step they stay until no other is left, because the rounding of the others depends on what is beside them in a
        batch.
        """
        self._max_tokens = max_tokens
        self._give_up_long()

    def wake_cache(self) -> None:
        """Be ready to generate."""
        self._engines.wake_cache()

    def sleep(self) -> None:
        """Leave the accelerators to others, and the other sides of episodes that were given up."""
        self._drop_all()
        self._engines.sleep()

    def receive_weights(self, version: int) -> dict[str, float]:
        """Take the actor's present weights; metrics of the transfer."""
        return self._engines.receive_weights(version)

    def _drop_all(self) -> None:
        for number in [*self._episodes]:
            self._drop(number)
        self._drain()

    def _drain(self) -> None:
        """Give up the turns that engines still sample for episodes that were given up."""
        if self._engines.is_generating:
            self._engines.cut(0)
        while self._engines.is_generating:
            self._engines.collect()

    def _give_up_long(self) -> None:
        most = self._max_tokens
        if most is None:
            return
        too_long = [number for number, episode in self._episodes.items() if episode.longest > most]
        if self._in_step and len(too_long) < len(self._episodes):
            return
        for number in too_long:
            self._drop(number)
        if not self._episodes:
            self._drain()
