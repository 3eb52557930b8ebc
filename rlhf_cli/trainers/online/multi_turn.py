"""Base class for multi-turn rollout engines: the engine interface, with episodes as responses."""

import time
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.trainers.online.interfaces import TurnEngines

WAIT_SECONDS = 0.01  # polling interval when engines and environments may both reply
CHARACTERS_PER_TOKEN = 16  # above any tokenizer's ratio, except for long runs of spaces


class Growing(Protocol):
    """An episode in progress."""

    @property
    def longest(self) -> int:
        """Number of response tokens so far."""
        ...


GrowingT = TypeVar("GrowingT", bound=Growing)


class MultiTurnEngines(ABC, Generic[GrowingT]):
    """Rollout engines with one episode per response."""

    def __init__(self, engines: TurnEngines, *, in_step: bool) -> None:
        self._engines = engines
        self._in_step = in_step
        # Request numbers restart at 0 in each batch, unlike episode names.
        self._episodes: dict[int, GrowingT] = {}  # unfinished, by request number
        self._finished: list[tuple[int, Generation]] = []
        self._max_tokens: int | None = None
        self._first = 0  # name of the batch's first episode, for environments and programs
        self._num_started = 0  # names used in all batches

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Return one episode per request, in order."""
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
        """Wait up to `timeout` seconds for turns and replies, and process them."""

    @abstractmethod
    def _drop(self, number: int) -> None:
        """Drop an episode."""

    def _name_episodes(self, count: int) -> None:
        """Assign unique names to a new batch's episodes."""
        # Names are never reused: a late reply for a dropped episode must not reach an episode in the next batch.
        self._max_tokens = None
        self._first, self._num_started = self._num_started, self._num_started + count

    @property
    def is_generating(self) -> bool:
        """Whether episodes in the batch are pending."""
        return bool(self._episodes or self._finished)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return newly finished episodes with request numbers.

        Waits for at least one, at most `timeout` seconds.
        """
        # Use a deadline, because `_advance` may return early several times.
        end = None if timeout is None else time.monotonic() + timeout
        while self._episodes and not self._finished:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                break
            self._advance(left)
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
        """Drop remaining episodes with their environments, and release the GPUs."""
        self._drop_all()
        self._engines.sleep()

    def receive_weights(self, version: int) -> dict[str, float]:
        """Load the actor's current weights. Returns transfer metrics."""
        return self._engines.receive_weights(version)

    def _drop_all(self) -> None:
        # Copy the keys: `_drop` removes entries.
        for number in [*self._episodes]:
            self._drop(number)
        self._drain()

    def _drain(self) -> None:
        """Discard turns that engines still sample for dropped episodes."""
        if self._engines.is_generating:
            # `cut(0)` makes engines drop all responses; the loop below collects those that finish first.
            self._engines.cut(0)
        while self._engines.is_generating:
            self._engines.collect()

    def _give_up_long(self) -> None:
        most = self._max_tokens
        if most is None:
            return
        too_long = [number for number, episode in self._episodes.items() if episode.longest > most]
        # Removing an episode from a running batch would change the rounding of the others.
        if self._in_step and len(too_long) < len(self._episodes):
            return
        for number in too_long:
            self._drop(number)
        # No episode needs the running turns any more.
        if not self._episodes:
            self._drain()
