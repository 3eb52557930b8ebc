"""Images in a terminal: with an image protocol if the environment identifies one, otherwise as half-block characters.

Sixel is not supported, because no environment variable identifies terminals that support it.
"""

import base64
import io
from collections.abc import Iterator, Mapping

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

_MAX_COLUMNS, _MAX_ROWS = 48, 18
"""Maximum image size in cells. A cell is about twice as high as wide, so a half block is roughly square."""
_LONGEST_SIDE = 512
"""Pixels of the copy sent with an image protocol."""
_CHUNK = 4096
"""Maximum payload per message in kitty's protocol, in characters."""
_KITTY_TERMS = ("xterm-kitty", "xterm-ghostty")
_ITERM_PROGRAMS = ("iTerm.app", "WezTerm")
_MULTIPLEXERS = ("screen", "tmux")
"""Terminal multiplexers: they inherit the outer terminal's environment variables but block image protocols."""
_UPPER_HALF = "▀"


def draws_pictures(console: Console) -> bool:
    """Return whether the console is a terminal with colors."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def print_picture(pixels: np.ndarray, console: Console, environment: Mapping[str, str], *, indent: int) -> None:
    """Print an image, uint8 [height, width, 3], on a console that supports it."""
    height, width, _ = pixels.shape
    columns, half_rows = cells_for(height, width, most_columns=console.width - indent)
    escape = escape_of(pixels, environment, columns=columns, rows=(half_rows + 1) // 2)
    if escape is not None:
        console.file.write(f"{' ' * indent}{escape}\n")
        return
    for line in _half_blocks(pixels, columns=columns, half_rows=half_rows):
        console.print(Text(" " * indent).append_text(line), soft_wrap=True, highlight=False)


def cells_for(height: int, width: int, *, most_columns: int) -> tuple[int, int]:
    """Compute columns and half rows for an image: within the limits, and never enlarged."""
    scale = min(min(_MAX_COLUMNS, max(most_columns, 1)) / width, 2 * _MAX_ROWS / height, 1)
    return max(1, round(width * scale)), max(1, round(height * scale))


def escape_of(pixels: np.ndarray, environment: Mapping[str, str], *, columns: int, rows: int) -> str | None:
    """Build the escape sequence for an image, or None if the terminal has no known image protocol."""
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if {"TMUX", "STY", "ZELLIJ"} & environment.keys() or term.startswith(_MULTIPLEXERS):
        return None
    if term in _KITTY_TERMS:
        return _kitty(_png(pixels), columns, rows)
    if program in _ITERM_PROGRAMS:
        return _iterm(_png(pixels), columns, rows)
    return None


def _kitty(png: bytes, columns: int, rows: int) -> str:
    """Build kitty's transmit-and-display sequence."""
    # q=2 suppresses the terminal's response, which the shell would read as input.
    text = base64.b64encode(png).decode()
    chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    keys = [f"a=T,f=100,q=2,c={columns},r={rows},", *[""] * (len(chunks) - 1)]
    more = [1] * (len(chunks) - 1) + [0]
    return "".join(f"\x1b_G{key}m={m};{part}\x1b\\" for key, m, part in zip(keys, more, chunks, strict=True))


def _iterm(png: bytes, columns: int, rows: int) -> str:
    text = base64.b64encode(png).decode()
    return f"\x1b]1337;File=inline=1;size={len(png)};width={columns};height={rows};preserveAspectRatio=1:{text}\x07"


def _png(pixels: np.ndarray) -> bytes:
    image, file = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    image.save(file, "PNG")
    return file.getvalue()


def _half_blocks(pixels: np.ndarray, *, columns: int, half_rows: int) -> Iterator[Text]:
    """Yield lines of half blocks: the foreground color is the upper pixel, the background color the lower one."""
    small = np.asarray(Image.fromarray(pixels).resize((columns, half_rows), Image.Resampling.BOX))
    for upper in range(0, half_rows, 2):
        line = Text()
        for column in range(columns):
            above = Color.from_rgb(*small[upper, column])
            below = Color.from_rgb(*small[upper + 1, column]) if upper + 1 < half_rows else None
            line.append(_UPPER_HALF, Style(color=above, bgcolor=below))
        yield line
