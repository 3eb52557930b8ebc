"""Responses on the terminal (--print_samples): each with prompt, reward and advantage, in lines of limited width."""

from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from rlhf_cli.tracking.figures import number
from rlhf_cli.tracking.sample_table import plain_text, spread

_SHOWN = ("reward", "advantage", "length")
_GAP = " … "
_NAME_CELLS = 10


def sample_lines(rows: Sequence[Mapping[str, object]], num_samples: int, *, cells: int) -> Iterator[str]:
    """Yield three lines for each of `num_samples` rows, chosen by `spread`.

    The first line has the `id` that `rlhf why` reads, and the numbers. Prompt and response follow; of long ones, the
    middle is left out.

    Args:
        rows: rows of samples.jsonl.
        num_samples: number of rows to show.
        cells: width of the lines.
    """
    for row in spread(rows, num_samples):
        yield shortened("  ".join([str(row.get("id", "")), *_numbers(row)]), cells)
        for name in ("prompt", "response"):
            yield f"  {name:{_NAME_CELLS}}{shortened(_plain(row.get(name)), cells - _NAME_CELLS - 2)}"


def _numbers(row: Mapping[str, object]) -> Iterator[str]:
    """Yield names and values of the row's numbers; `none` for a missing reward or advantage."""
    for name in _SHOWN:
        value = row.get(name)
        if name in row:
            yield f"{name} {number(value) if isinstance(value, int | float) else 'none'}"
    yield str(row.get("verdict") or row.get("finish_reason") or "")


def _plain(text: object) -> str:
    """Return a text or the messages of a prompt in one line, without control characters."""
    # A response may hold escape sequences, which would change the terminal.
    return "".join(
        character if character.isprintable() else "⏎" if character == "\n" else "�" for character in plain_text(text)
    )


def shortened(text: str, cells: int) -> str:
    """Return a text in at most `cells` cells: beginning and end, because answers are at the end."""
    if cell_len(text) <= cells:
        return text
    rest = max(0, cells - len(_GAP))
    end = set_cell_size(text[::-1], rest // 2)[::-1]
    return set_cell_size(text, rest - rest // 2) + _GAP[: max(0, cells)] + end
