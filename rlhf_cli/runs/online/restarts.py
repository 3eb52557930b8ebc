"""Restarts a run after a process has died."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhf_cli.errors import ProcessDied


@dataclass
class Restarts:
    """The restarts of a run; `count` so far, of at most `max_restarts`."""

    max_restarts: int
    should_stop: Callable[[], bool]
    has_checkpoint: Callable[[], bool]
    say: Callable[[str], None]
    count: int = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """End the block quietly, after a notice, if a process dies in it and another restart is allowed."""
        try:
            yield
        except ProcessDied as death:
            # A stop request wins: the user does not expect a new start.
            if self.count == self.max_restarts or self.should_stop():
                raise
            # Count before the next attempt, so that a death during its start counts too.
            self.count += 1
            way = "going on from the last checkpoint" if self.has_checkpoint() else "no checkpoint yet, beginning anew"
            self.say(f"{death.message}; {way} (restart {self.count} of {self.max_restarts})")
