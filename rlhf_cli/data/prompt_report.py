"""Report of loading prompts."""

from dataclasses import dataclass, field

from rlhf_cli.data.preparing import COUNTED, MAX_NOTED
from rlhf_cli.data.reading.sources import ReadSource
from rlhf_cli.data.tokenizing.control_tokens import controls_phrase


@dataclass
class PromptReport:
    """Report of loading prompts.

    `lengths` counts prompts by tokens; `noted` lists the first dropped rows per counter, with the reason.
    """

    sources: list[ReadSource] = field(default_factory=list)
    rows: int = 0
    prompts: int = 0
    labelled: int = 0
    dropped_by_pass_rate: int = 0
    dropped_invalid: int = 0
    dropped_overlong: int = 0
    longest: int = 0
    """Number of tokens in the longest kept prompt."""
    largest_token: int = -1
    """Largest token ID, and its first row."""
    largest_token_at: str = ""
    control_rows: int = 0
    """Number of prompts with special tokens in messages, prompts per token, and the first row."""
    control_tokens: dict[str, int] = field(default_factory=dict)
    control_at: str = ""
    lengths: dict[int, int] = field(default_factory=dict)
    noted: dict[str, list[str]] = field(default_factory=dict)

    def note(self, counter: str, note: str) -> None:
        """Increment a counter, and store the note if it is among the first."""
        setattr(self, counter, getattr(self, counter) + 1)
        listed = self.noted.setdefault(counter, [])
        if len(listed) < MAX_NOTED:
            listed.append(note)

    @property
    def summary(self) -> str:
        """One-line summary."""
        dropped = f", {self.dropped_by_pass_rate:,} dropped by pass rate" if self.dropped_by_pass_rate else ""
        for counter in ("dropped_invalid", "dropped_overlong"):
            if count := getattr(self, counter):
                dropped += f", {count:,} {COUNTED[counter]}"
        dropped += f", {controls_phrase(self)}" if self.control_rows else ""
        return (
            f"{'; '.join(map(str, self.sources))}, {self.rows:,} rows gave {self.prompts:,} prompts of at most "
            f"{self.longest:,} tokens, {self.labelled:,} with ground truth{dropped}"
        )
