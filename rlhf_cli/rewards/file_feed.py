"""Calls of the user's reward file, each about the responses to one prompt, beside whatever the caller does.

The worker's side is workers/user_file.py; session.py waits until a prompt's responses are complete.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlhf_cli.rewards.parts import Part, file_parts
from rlhf_cli.rewards.png import png_in_base64
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.workers.pool import Failure, WorkerPool
from rlhf_cli.rewards.workers.user_forms import UserBatch

if TYPE_CHECKING:
    from rlhf_cli.models.vision.pictures import Picture


@dataclass(eq=False)
class _Call:
    """One call of the file: the responses' numbers, the arguments, and the parts received so far."""

    numbers: Sequence[int]
    batch: UserBatch
    tries: int = 0
    parts: list[Part] = field(default_factory=list)


Decode = Callable[[Sequence[int]], str]
"""The text of tokens, special ones kept."""

NO_ROW = '{"prompt": "", "columns": {}}'


def batch_of(requests: Sequence[ScoreRequest], decode: Decode | None, *, needs: Sequence[str]) -> UserBatch:
    """Return the file's arguments for these responses; large columns only if the file needs them.

    Without `decode`, a text with special tokens is the same as without.
    """
    rows = [request.row or NO_ROW for request in requests] if "rows" in needs else [NO_ROW] * len(requests)
    distinct = list(dict.fromkeys(rows))
    is_raw = decode is not None and "raw_responses" in needs
    pictured = requests if "images" in needs else []
    pictures = _numbered(pictured)
    raw = [decode(request.token_ids) if decode and is_raw else request.response for request in requests]
    return UserBatch(
        queries=[request.query for request in requests],
        prompts=[request.prompt for request in requests],
        labels=[request.label for request in requests],
        responses=[request.response for request in requests],
        raw_responses=raw if "raw_responses" in needs else [],
        token_ids=[list(request.token_ids) for request in requests] if "token_ids" in needs else [],
        lengths=[request.num_tokens for request in requests],
        finish_reasons=["length" if request.truncated else "stop" for request in requests],
        sources=[request.source for request in requests],
        rows=[json.loads(row) for row in distinct],
        row_of=[distinct.index(row) for row in rows],
        messages=[list(request.messages) for request in requests],
        pictures=[png_in_base64(picture) for picture in pictures],
        pictures_of=[[pictures[picture] for picture in request.pictures] for request in pictured],
    )


def _numbered(requests: Sequence[ScoreRequest]) -> "dict[Picture, int]":
    """Return the distinct pictures of the requests, numbered: a worker gets each once."""
    distinct = dict.fromkeys(picture for request in requests for picture in request.pictures)
    return {picture: number for number, picture in enumerate(distinct)}


class FileFeed:
    """One round of calls; a context manager.

    If a call or some of its values fail, the file is called again with all its responses, at most `retries` times,
    unless it took too long; values that were good are kept.
    """

    def __init__(self, pool: WorkerPool, *, retries: int, decode: Decode | None) -> None:
        self._pool, self._decode = pool, decode
        self._feed = pool.feed()
        self._retries = retries
        self._calls: list[_Call] = []  # by number of the item
        self._num_open = 0
        self._found: list[tuple[int, Part]] = []  # not yet given out
        self.failures: list[Failure] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.close()

    def add(self, numbers: Sequence[int], requests: Sequence[ScoreRequest]) -> None:
        """Have the file called with these responses. Returns at once."""
        self._num_open += 1
        self._send(_Call(numbers, batch_of(requests, self._decode, needs=self._pool.about["needs"])))

    def ready(self) -> list[tuple[int, Part]]:
        """Return the parts that have come since the last call, each with the number of its response. Never waits."""
        self._advance()
        found, self._found = self._found, []
        return found

    @property
    def is_open(self) -> bool:
        """Whether there are parts that `ready` has not given yet."""
        return self._num_open > 0 or bool(self._found)

    def wait(self) -> None:
        """Wait until a call has ended, or all have."""
        self._feed.wait()

    def _send(self, call: _Call) -> None:
        self._calls.append(call)
        self._feed.add([call.batch])

    def _advance(self) -> None:
        """Take what calls have brought, and repeat the calls that failed."""
        for item, outcome in self._feed.ready():
            call = self._calls[item]
            self.failures += [outcome.failure] if outcome.failure is not None else []
            new = file_parts(outcome, len(call.numbers))
            call.parts = [
                old if old.value is not None else now for old, now in zip(call.parts or new, new, strict=True)
            ]
            call.tries += 1
            is_late = outcome.failure is not None and outcome.failure.kind == "timeout"
            if call.tries <= self._retries and not is_late and any(part.value is None for part in call.parts):
                self._send(call)
            else:
                self._num_open -= 1
                self._found += zip(call.numbers, call.parts, strict=True)
