"""The replies of environments on their way from the thread that gets them to the caller, who waits for them.

An episode that begins anew, or is dropped, has another number from then on: replies to the earlier one are not seen.
"""

import itertools
import threading
from collections.abc import Iterable

from rlhf_cli.agents.records import Action, Reply, Reset


class Mailbox:
    """Numbers the environments of episodes, and keeps the replies that were not collected yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._numbers: dict[int, int] = {}  # by episode
        self._episodes: dict[int, int] = {}  # the inverse
        self._unanswered: set[int] = set()
        self._replies: list[tuple[int, Reply]] = []
        self._defect: BaseException | None = None
        self._count = itertools.count()

    def ask(self, episode: int, action: Action) -> int:
        """Expect the reply to an action of an episode; return the number of its environment, a new one after `Reset`.

        Raises what `break_down` got.
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
        """Forget an episode and its reply; return its number, None if it has none."""
        with self._changed:
            number = self._numbers.pop(episode, None)
            if number is not None:
                del self._episodes[number]
                self._unanswered.discard(number)
                self._replies = [one for one in self._replies if one[0] != number]
                self._changed.notify_all()  # nothing may be left to wait for
            return number

    def deliver(self, replies: Iterable[tuple[int, Reply]]) -> None:
        """Take replies, each with its number; replies that nobody expects are lost."""
        with self._changed:
            expected = [(number, reply) for number, reply in replies if number in self._unanswered]
            self._unanswered.difference_update(number for number, _ in expected)
            self._replies += expected
            self._changed.notify_all()

    def break_down(self, defect: BaseException) -> None:
        """Raise an error for whoever waits, or asks from now on: no more replies come."""
        with self._changed:
            self._defect = defect
            self._changed.notify_all()

    def collect(self, timeout: float | None) -> list[tuple[int, Reply]]:
        """Return the replies since the last call, each with its episode. Wait for one, at most `timeout` seconds.

        Returns at once if no action is on its way. Raises what `break_down` got.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._defect or self._replies or not self._unanswered, timeout)
            self._raise_defect()
            replies, self._replies = self._replies, []
            return [(self._episodes[number], reply) for number, reply in replies]

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise self._defect
