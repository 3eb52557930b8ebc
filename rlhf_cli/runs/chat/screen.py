"""Terminal input and output of a chat, and a plain version for scripts."""

import io
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from rich.console import Console
from rich.segment import Segment, Segments

from rlhf_cli.runs.chat.commands import COMMANDS
from rlhf_cli.runs.chat.thoughts import ThoughtMarks
from rlhf_cli.tracking.terminal.console import LastingStream, open_console

_BLOCK = '"""'
"""Line that starts or ends a multi-line message."""
_PROMPT, _CONTINUED = "> ", ". "
_VISIBLE = {number: 0x2400 + number for number in range(32) if chr(number) not in "\n\t"} | {0x7F: 0x2421}
"""Visible symbols for control characters, so that an answer cannot move the cursor or change the window title."""


class Screen(Protocol):
    """Input and output of a chat. `is_interactive`: a user can stop answers and read hints."""

    is_interactive: bool

    def read(self) -> str | None:
        """Return the next message or command; None at the end. Raises KeyboardInterrupt on Ctrl-C."""
        ...

    def tell(self, text: str) -> None:
        """Print a status message, separate from answers."""

    def fault(self, text: str) -> None:
        """Print an error about an input line."""

    def begin(self, name: str | None, *, opens_thought: bool) -> None:
        """Begin an answer. `name` is the model's name with multiple models."""

    def write(self, piece: str) -> None:
        """Print the next piece of the answer."""

    def end(self, note: str) -> None:
        """End the answer with an optional note."""


def open_screen() -> Screen:
    """Return a terminal screen, or plain text if standard input is not a terminal."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 must not end the chat
    # Messages of the script must not mix with the answers on standard output.
    if not sys.stdin.isatty():
        return PipeScreen(sys.stdin, LastingStream(1), LastingStream(2))
    _edit_lines()
    return TerminalScreen(open_console(LastingStream(1)), input)


def _edit_lines() -> None:
    """Set up line editing with history and command completion for `input`."""
    import readline

    def completed(text: str, state: int) -> str | None:
        fitting = [f"/{name} " for name in COMMANDS if f"/{name}".startswith(text)] if text.startswith("/") else []
        return fitting[state] if state < len(fitting) else None

    # `/` is one of readline's default delimiters, which would split commands.
    readline.set_completer_delims(" \t\n")
    readline.set_completer(completed)
    readline.parse_and_bind("tab: complete")
    # Pasted text may contain newlines, which must not send the message early.
    readline.parse_and_bind("set enable-bracketed-paste on")


class TerminalScreen:
    """Terminal screen: streams answers and dims reasoning. Colors are disabled by NO_COLOR."""

    is_interactive = True

    def __init__(self, console: Console, read_line: Callable[[str], str]) -> None:
        self._console = console
        self._read_line = read_line
        self._marks = ThoughtMarks(is_open=False)

    def read(self) -> str | None:
        try:
            return joined_lines(self._read_line)
        except EOFError:
            self._console.print()
            return None

    def tell(self, text: str) -> None:
        self._print(f"{text}\n", "dim")

    def fault(self, text: str) -> None:
        self._print(f"{text}\n", "red")

    def begin(self, name: str | None, *, opens_thought: bool) -> None:
        self._marks = ThoughtMarks(is_open=opens_thought)
        if name is not None:
            self._print(f"{name}\n", "bold cyan")

    def write(self, piece: str) -> None:
        self._parts(self._marks.add(piece))

    def end(self, note: str) -> None:
        self._parts(self._marks.rest())
        self._print("\n", "")
        if note:
            self._print(f"({note})\n", "dim")
        self._print("\n", "")

    def _parts(self, parts: Iterable[tuple[str, bool]]) -> None:
        for text, is_thought in parts:
            # Escape before printing: model output may contain terminal control sequences.
            self._print(text.translate(_VISIBLE), "dim" if is_thought else "")

    def _print(self, text: str, style: str) -> None:
        """Print text unchanged: rich's own strings expand tabs and replace :names: with emoji."""
        is_plain = self._console.no_color or not style
        segment = Segment(text, None if is_plain else self._console.get_style(style))
        self._console.print(Segments([segment]), end="", soft_wrap=True)


def joined_lines(read_line: Callable[[str], str]) -> str:
    """Read a message that may span lines, continued by a backslash or between two quote lines."""
    line = read_line(_PROMPT)
    if line.strip() == _BLOCK:
        return "\n".join(iter(lambda: read_line(_CONTINUED), _BLOCK))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line(_CONTINUED))
    return "\n".join(lines)


class PipeScreen:
    """Input from a file or pipe, one message per line. Only answers go to `output`; everything else goes to
    `errors`.
    """

    is_interactive = False

    def __init__(self, lines: Iterable[str], output: io.TextIOBase, errors: io.TextIOBase) -> None:
        self._lines = iter(lines)
        self._output = output
        self._errors = errors

    def read(self) -> str | None:
        line = next(self._lines, None)
        return None if line is None else line.rstrip("\r\n")

    def tell(self, text: str) -> None:
        self._errors.write(f"{text}\n")

    def fault(self, text: str) -> None:
        self.tell(f"rlhf chat: {text}")

    def begin(self, name: str | None, *, opens_thought: bool) -> None:
        self.write("" if name is None else f"[{name}] ")

    def write(self, piece: str) -> None:
        self._output.write(piece)

    def end(self, note: str) -> None:
        self.write("\n")
        if note:
            self.tell(f"({note})")
