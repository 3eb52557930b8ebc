"""What the person at the terminal sees and types, and the plain form of it for scripts."""

import io
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from rich.console import Console
from rich.segment import Segment, Segments

from rlhf_cli.runs.chat.commands import COMMANDS
from rlhf_cli.runs.chat.thoughts import ThoughtMarks
from rlhf_cli.tracking.terminal.console import LastingStream, open_console

BLOCK = '"""'
"""A line of it begins and ends a message of several lines."""
PROMPT, CONTINUED = "> ", ". "
VISIBLE = {number: 0x2400 + number for number in range(32) if chr(number) not in "\n\t"} | {0x7F: 0x2421}
"""Control characters as pictures of them: an answer must not move the cursor or set the title of a window."""


class Screen(Protocol):
    """Where lines come from and answers go to. `is_interactive` if a person may stop an answer and read hints."""

    is_interactive: bool

    def read(self) -> str | None:
        """Return the next message or command, None at the end. Raise KeyboardInterrupt for Ctrl-C."""
        ...

    def tell(self, text: str) -> None:
        """Show a text about the chat, which is no answer."""

    def fault(self, text: str) -> None:
        """Show why a line cannot be done."""

    def begin(self, name: str | None, *, opens_thought: bool) -> None:
        """Begin an answer, of the model of that name if there are several."""

    def write(self, piece: str) -> None:
        """Show the next piece of the answer."""

    def end(self, note: str) -> None:
        """End the answer, with a note about its end."""


def open_screen() -> Screen:
    """Return the terminal, or plain text if standard input is no terminal."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no UTF-8 must not end the chat
    if not sys.stdin.isatty():
        return PipeScreen(sys.stdin, LastingStream(1), LastingStream(2))
    edit_lines()
    return TerminalScreen(open_console(LastingStream(1)), input)


def edit_lines() -> None:
    """Give `input` a line editor with the lines of before, and completion of commands."""
    import readline

    def completed(text: str, state: int) -> str | None:
        fitting = [f"/{name} " for name in COMMANDS if f"/{name}".startswith(text)] if text.startswith("/") else []
        return fitting[state] if state < len(fitting) else None

    readline.set_completer_delims(" \t\n")
    readline.set_completer(completed)
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")


class TerminalScreen:
    """A terminal: answers as they are written, thoughts dimmed; colours unless NO_COLOR is set."""

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
            self._print(text.translate(VISIBLE), "dim" if is_thought else "")

    def _print(self, text: str, style: str) -> None:
        """Write text as it is: rich's own strings would get their tabs expanded and :names: replaced by emoji."""
        is_plain = self._console.no_color or not style
        segment = Segment(text, None if is_plain else self._console.get_style(style))
        self._console.print(Segments([segment]), end="", soft_wrap=True)


def joined_lines(read_line: Callable[[str], str]) -> str:
    """Return a message that may have several lines: ended by a backslash, or between two lines of quotes."""
    line = read_line(PROMPT)
    if line.strip() == BLOCK:
        return "\n".join(iter(lambda: read_line(CONTINUED), BLOCK))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line(CONTINUED))
    return "\n".join(lines)


class PipeScreen:
    """Lines of a file or pipe: a message a line, answers on `output` alone, all else on `errors`."""

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
