"""Replies from environments, passed from the thread that receives them to the caller who waits for them.

An episode that restarts or is dropped gets a new number, so late replies to the previous one are discarded.
"""

import itertools
import threading

from rlhf_cli.agents.records import Action, Reply, Reset


class Mailbox:
    """Numbers the environments and stores uncollected replies. Thread-safe."""

    def __init__(self) -> None:
        # Guards all fields below.
        self._changed = threading.Condition()
        # By episode, and the inverse.
        self._numbers: dict[int, int] = {}
        self._episodes: dict[int, int] = {}
        self._unanswered: set[int] = set()
        self._replies: list[tuple[int, Reply]] = []
        self._defect: BaseException | None = None
        self._count = itertools.count()

    def ask(self, episode: int, action: Action) -> int:
        """Register a pending action. Returns the environment's number, which is new after `Reset`.

        Raises the exception passed to `break_down`.
        """
        with self._changed:
            self._raise_defect()
            if isinstance(action, Reset):
                assert episode not in self._numbers, f"episode {episode} has begun"
                self._numbers[episode] = next(self._count)
                self._episodes[self._numbers[episode]] = episode
            number = self._numbers[episode]
            assert number not in self._unanswered, f"episode {episode} has an action on its way"
            self._unanswered.add(number)
            return number

    def drop(self, episode: int) -> int | None:
        """Forget an episode and any pending reply. Returns the environment's number, or None."""
        with self._changed:
            number = self._numbers.pop(episode, None)
            if number is not None:
                del self._episodes[number]
                self._unanswered.discard(number)
                self._replies = [one for one in self._replies if one[0] != number]
                # A waiting `collect` must return if this was the last pending action.
                self._changed.notify_all()
            return number

    def deliver(self, number: int, reply: Reply) -> None:
        """Store a reply by environment number. An unexpected reply is discarded."""
        with self._changed:
            if number in self._unanswered:
                self._unanswered.remove(number)
                self._replies.append((number, reply))
                self._changed.notify_all()

    def break_down(self, defect: BaseException) -> None:
        """Raise an exception in current and future callers, because no more replies will come."""
        with self._changed:
            self._defect = defect
            self._changed.notify_all()

    def collect(self, timeout: float | None) -> list[tuple[int, Reply]]:
        """Return replies since the last call, with their episodes. Waits up to `timeout` seconds for the first one.

        Returns immediately if no action is pending. Raises the exception passed to `break_down`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._defect or self._replies or not self._unanswered, timeout)
            self._raise_defect()
            replies, self._replies = self._replies, []
            return [(self._episodes[number], reply) for number, reply in replies]

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise self._defect
