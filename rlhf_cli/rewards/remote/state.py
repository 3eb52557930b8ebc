"""The state of one response and of one server while rewards are asked for."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.workers.pool import Failure, ItemOutcome

FIRST_ABSENCE, LONGEST_ABSENCE = 0.5, 30.0
"""Seconds a server is left out after a failed call; doubled with each further one in a row."""


@dataclass(eq=False)
class WaitingItem:
    """A response that waits for its reward; `tried` are the servers whose calls with it failed."""

    request: ScoreRequest
    future: "Future[ItemOutcome]"
    tries: int = 0
    alone: bool = False
    tried: set[str] = field(default_factory=set)
    full_since: float | None = None

    def end(self, outcome: ItemOutcome) -> None:
        """Give the outcome to whoever waits for it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(outcome)


@dataclass(eq=False)
class RewardServer:
    """A server as the client knows it."""

    url: str
    is_away: bool = False
    busy_until: float = 0.0
    failures: int = 0  # in a row
    last: Failure | None = None
    takes_images: bool | None = None  # not known before the first prompt with pictures
    is_reported: bool = False  # that it takes texts alone
    is_refusing: bool = False  # has answered with a status of 400 to 499, which is reported once
    is_blind: bool = False  # takes texts alone beside servers that see pictures: left out for good

    @property
    def absence(self) -> float:
        """Seconds until the next probe."""
        return min(FIRST_ABSENCE * 2 ** max(self.failures - 1, 0), LONGEST_ABSENCE)
