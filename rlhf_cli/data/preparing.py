"""Report of loading a dataset, and the policy for long rows of offline data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa

from rlhf_cli.config.data import OfflineDataConfig
from rlhf_cli.data.reading.sources import ReadSource, Row
from rlhf_cli.data.templates.turn_spans import Span
from rlhf_cli.data.tokenizing.tokenizer import Tokens
from rlhf_cli.errors import UsageError

NUMBERS = pa.list_(pa.int32())
"""Column of token IDs or bounds."""
FRACTIONS = pa.list_(pa.float32())
"""Column of loss weights."""
_KNOWN_BEFORE = {"items_are", "sources", "end_of_turn", "rows"}
"""Report fields known before rows are read."""
_MAX_NOTED = 5
"""Maximum number of rows listed per counter."""
COUNTED = {
    "dropped_by_pass_rate": "dropped by pass rate",
    "truncated": "truncated",
    "dropped_invalid": "dropped as invalid",
    "dropped_overlong": "dropped as too long",
    "dropped_untrained": "dropped with nothing to train on",
    "dropped_equal": "dropped as equal within max_len",
    "merged_starts": "with leading white space that carries no loss",
    "unthought_turns": "earlier turns without the thought they had, which the chat template drops",
    "weighted_rows": "with a loss weight other than 0 and 1",
    "marked_rows": "with text that a mark leaves out of the loss",
    "inlined_thoughts": "turns whose reasoning_content became <think> text, as no chat template reads it",
}
"""Counter fields with descriptions."""


@dataclass
class DataReport:
    """Report of loading a dataset: counts of rows, items, and tokens after truncation.

    - `items_are`: name of the items, such as 'sequences'.
    - `details`: counts of special items, such as {'with a margin': 12}.
    - `lengths`: number of rows or labeled responses by tokens, before truncation. A pair counts with its longer side,
      including the prompt.
    - `noted`: first rows per counter, with the reason.
    - `largest_token`: largest token ID before truncation; `largest_token_at` is its first row.
    - `control_rows`: number of rows with special tokens in messages; `control_tokens` counts rows per token;
      `control_at` is the first row.
    - `longest_prompt`, `labelled`: of prompts, the tokens of the longest kept one, and the number with ground truth.
    """

    items_are: str
    sources: list[ReadSource] = field(default_factory=list)
    end_of_turn: str | None = None
    rows: int = 0
    items: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest_prompt: int = 0
    labelled: int = 0
    details: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    dropped_by_pass_rate: int = 0
    dropped_invalid: int = 0
    dropped_overlong: int = 0
    dropped_untrained: int = 0
    dropped_equal: int = 0
    merged_starts: int = 0
    unthought_turns: int = 0
    inlined_thoughts: int = 0
    marked_rows: int = 0
    weighted_rows: int = 0
    largest_token: int = -1
    largest_token_at: str = ""
    control_rows: int = 0
    control_tokens: dict[str, int] = field(default_factory=dict)
    control_at: str = ""
    lengths: dict[int, int] = field(default_factory=dict)
    noted: dict[str, list[str]] = field(default_factory=dict)

    def note(self, counter: str, note: str) -> None:
        """Increment a counter, and store the note if it is among the first."""
        setattr(self, counter, getattr(self, counter) + 1)
        listed = self.noted.setdefault(counter, [])
        if len(listed) < _MAX_NOTED:
            listed.append(note)

    def note_largest(self, ids: Sequence[int], row: Row) -> None:
        """Record the largest ID in a row's tokens, if any."""
        largest = max(ids, default=-1)
        if largest > self.largest_token:
            self.largest_token, self.largest_token_at = largest, row.where

    def note_controls(self, found: frozenset[str], row: Row) -> None:
        """Count a row with special tokens in its messages."""
        if not found:
            return
        self.control_rows += 1
        self.control_at = self.control_at or row.where
        for token in sorted(found):
            self.control_tokens[token] = self.control_tokens.get(token, 0) + 1

    def count_turns(self, *sides: Tokens) -> None:
        """Count special turns of an item. Its sides share all turns except one."""
        self.marked_rows += any(bool(side.left_out) for side in sides)
        # Sides of a pair share turns, so take the maximum instead of the sum.
        self.merged_starts += any(side.merged for side in sides)
        self.unthought_turns += max(side.num_unthought for side in sides)
        self.inlined_thoughts += max(side.num_inlined for side in sides)

    def counts(self) -> dict[str, object]:
        """Return all counts, without the fields known before reading."""
        return {name: value for name, value in asdict(self).items() if name not in _KNOWN_BEFORE}

    def take(self, counts: dict[str, object]) -> None:
        """Restore the counts from an earlier run on the same data."""
        for name, value in counts.items():
            setattr(self, name, value)
        self.lengths = {int(length): count for length, count in self.lengths.items()}  # JSON keys are strings

    def longest(self, config: OfflineDataConfig) -> int:
        """Return the number of tokens in the longest kept row, after truncation."""
        drops = config.overlong == "drop"
        kept = (length for length in self.lengths if not drops or length <= config.max_len)
        return min(max(kept, default=0), config.max_len)

    @property
    def summary(self) -> str:
        """One-line summary."""
        amount = f"{self.tokens:,} tokens, {self.trained_tokens:,} trained"
        if self.items_are == "prompts":
            amount = f"at most {self.longest_prompt:,} tokens, {self.labelled:,} with ground truth"
        counted = self.details | {what: getattr(self, counter) for counter, what in COUNTED.items()}
        parts = [
            "; ".join(map(str, self.sources)),
            f"{self.rows:,} rows gave {self.items:,} {self.items_are} of {amount}",
            *(f"{count:,} {what}" for what, count in counted.items() if count),
            self._controls,
        ]
        return ", ".join(filter(None, parts)) + (f"; turns end with {self.end_of_turn}" if self.end_of_turn else "")

    @property
    def _controls(self) -> str:
        """Phrase for rows with special tokens; "" without."""
        if not self.control_rows:
            return ""
        tokens = ", ".join(f"{token} in {count:,}" for token, count in self.control_tokens.items())
        return (
            f"{self.control_rows:,} with special tokens in the text of their messages, calls or tools, which become "
            f"control tokens ({tokens}; first: {self.control_at})"
        )


def fitting(row: Row, tokens: list[Tokens], config: OfflineDataConfig, report: DataReport) -> list[Tokens] | None:
    """Apply the policy for long rows. Returns the row's examples within `max_len`; None if the row is dropped.

    Counts dropped rows. The caller counts truncated rows, because it may drop the row for other reasons.
    """
    longest = max(len(part.ids) for part in tokens)
    # Count lengths before dropping, for the histogram.
    report.lengths[longest] = report.lengths.get(longest, 0) + 1
    overlong = longest > config.max_len
    if overlong and config.overlong == "error":
        raise UsageError(
            f"{row.where}: {longest} tokens are more than max_len {config.max_len} (--overlong truncate|drop)"
        )
    if overlong and config.overlong == "drop":
        report.note("dropped_overlong", f"{row.where}: {longest:,} tokens")
        return None
    cut = [part.cut(config.max_len) for part in tokens] if overlong else tokens
    if any(part.num_trained == 0 for part in cut):
        within = f" within the first {config.max_len:,} of {longest:,} tokens" if overlong else ""
        by_marks = ": marks leave it out" if any(part.left_out for part in cut) else ""
        report.note("dropped_untrained", f"{row.where}: nothing to train on{within}{by_marks}")
        return None
    return cut


def count_cut(row: Row, whole: list[Tokens], kept: list[Tokens], report: DataReport) -> None:
    """Count a kept row if it was truncated."""
    if kept != whole:
        report.note("truncated", f"{row.where}: {max(len(part.ids) for part in whole):,} tokens")


def flat(spans: list[Span]) -> list[int]:
    """Flatten spans to a list of bounds, as stored."""
    return [bound for span in spans for bound in span]


def mask_of(spans: np.ndarray, length: int) -> np.ndarray:
    """Convert stored bounds to a bool mask over `length` tokens."""
    mask = np.zeros(length, dtype=bool)
    for start, stop in spans.reshape(-1, 2):
        mask[start:stop] = True
    return mask
