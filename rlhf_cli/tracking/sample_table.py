"""A small table of samples, spread over the prompts of an iteration, for the terminal and for trackers."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

Row = Mapping[str, object]

COLUMNS = ("id", "prompt", "response", "reward", "advantage")
TEXT_COLUMNS = ("id", "prompt", "response")
_LONGEST = 4000
"""Characters of a text in a table. samples.jsonl holds the whole text."""
_GAP = "\n … \n"
_MARKUP = re.compile(r"[\\`*_\[\]<>&|~]")


def spread(rows: Sequence[Row], num_samples: int) -> Iterator[Row]:
    """Yield `num_samples` rows, spread evenly over all rows: the samples of a prompt are next to each other."""
    shown = min(num_samples, len(rows))
    return (rows[place * len(rows) // shown] for place in range(shown))


def plain_text(value: object) -> str:
    """Return a text, or the messages of a prompt as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sample_table(rows: Sequence[Row], num_samples: int) -> list[list[str | float | None]]:
    """Return `num_samples` rows of samples.jsonl with the columns `COLUMNS`. Of long texts, the middle is left out."""
    return [[_cell(name, row.get(name)) for name in COLUMNS] for row in spread(rows, num_samples)]


def _cell(name: str, value: object) -> str | float | None:
    if name not in TEXT_COLUMNS:
        return float(value) if isinstance(value, int | float) else None
    # A response may hold half of a surrogate pair, which UTF-8 cannot encode.
    text = plain_text("" if value is None else value).encode(errors="replace").decode()
    half = (_LONGEST - len(_GAP)) // 2
    return text if len(text) <= _LONGEST else text[:half] + _GAP + text[-half:]


def markdown(table: Sequence[Sequence[str | float | None]]) -> str:
    """Return a table as Markdown. Markup is shown literally."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([_markdown_cell(cell) for cell in row] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(cell: str | float | None) -> str:
    if not isinstance(cell, str):
        return "none" if cell is None else f"{cell:.6g}"
    literal = _MARKUP.sub(lambda match: f"&#{ord(match[0])};", cell)
    # A row of a Markdown table is one line.
    return "<br>".join(literal.splitlines())
