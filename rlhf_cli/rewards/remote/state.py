"""Client-side state for queued responses and reward servers."""

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rlhf_cli.rewards.workers.pool import Failure, ItemOutcome

if TYPE_CHECKING:
    from rlhf_cli.models.vision.pictures import Picture

FIRST_ABSENCE, _LONGEST_ABSENCE = 0.5, 30.0
"""Seconds until the first health check after a failed call, and the longest interval. It doubles with each failure."""


class Request(Protocol):
    """What a server scores."""

    @property
    def pictures(self) -> "tuple[Picture, ...]":
        """Images, in order."""


@dataclass(frozen=True)
class Wire:
    """How requests reach the servers of one kind.

    - `title`: name of a server in messages.
    - `calls_per_server`: concurrent batches.
    - `post`, `probe`, `takes_images`: the calls, with the parameters and errors of those in call.py.
    """

    title: str
    calls_per_server: int
    post: Callable[..., Awaitable[list[ItemOutcome]]]
    probe: Callable[..., Awaitable[None]]
    takes_images: Callable[..., Awaitable[bool]]


@dataclass(eq=False)
class WaitingItem:
    """A queued response.

    - `request`: a response, or a question to a judge.
    - `tries`: failed calls that count against the retry limit.
    - `alone`: send it in a separate batch.
    - `tried`: URLs with a failed call.
    - `full_since`: time of the first rejection by an overloaded server, in seconds on the monotonic clock.
    """

    request: Request
    future: "Future[ItemOutcome]"
    tries: int = 0
    alone: bool = False
    tried: set[str] = field(default_factory=set)
    full_since: float | None = None

    def end(self, outcome: ItemOutcome) -> None:
        """Resolve the future, unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(outcome)


@dataclass(eq=False)
class RewardServer:
    """Client-side view of a reward server.

    - `is_away`: unavailable; receives no batches.
    - `busy_until`: end of the requested back-off, on the monotonic clock.
    - `failures`: consecutive failures.
    - `last`: the latest failure.
    - `takes_images`: image support; None until the first prompt with images.
    - `is_reported`: missing image support has been logged.
    - `is_refusing`: a 4xx rejection has been logged.
    - `is_blind`: excluded for good: it does not support images, but another server does.
    """

    url: str
    is_away: bool = False
    busy_until: float = 0.0
    failures: int = 0
    last: Failure | None = None
    takes_images: bool | None = None
    is_reported: bool = False
    is_refusing: bool = False
    is_blind: bool = False

    @property
    def absence(self) -> float:
        """Seconds until the next health check, with exponential back-off."""
        # `failures` may be 0 here: a concurrent call to the same server may have succeeded since.
        return min(FIRST_ABSENCE * 2 ** max(self.failures - 1, 0), _LONGEST_ABSENCE)
