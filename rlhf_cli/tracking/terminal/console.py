"""Keeps the terminal for this program's own messages: everything else a process prints goes to a log file.

Works on descriptors, not on `sys.stdout`, so that libraries in C, worker processes and launchers are covered too.
progress.py decides which messages the terminal shows.
"""

import ctypes
import io
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console, ConsoleDimensions

from rlhf_cli.errors import UsageError


class TerminalConsole(Console):
    """A rich console that asks its own stream for the size.

    rich asks descriptors 0, 1 and 2, of which 1 and 2 are the log file here and 0 is often no terminal.
    """

    @property  # type: ignore[misc]  # rich's setter is not wanted: the size is the terminal's
    def size(self) -> ConsoleDimensions:
        """Columns and rows of the terminal behind the stream; 80 x 25 if there is none."""
        if not self.is_terminal:
            return super().size
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return super().size
        return ConsoleDimensions(columns or 80, rows or 25)


def open_console(stream: io.TextIOBase) -> Console:
    """Return a console on `stream`: colours and live views on a terminal, else plain text without any escape
    sequence.
    """
    file = cast(TextIO, stream)
    interactive = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    if interactive:
        return TerminalConsole(file=file, force_terminal=True, highlight=False)
    # soft_wrap: a log line of a scheduler must stay one line however long it is
    return TerminalConsole(
        file=file, force_terminal=False, force_interactive=False, color_system=None, highlight=False, soft_wrap=True
    )


class LastingStream(io.TextIOBase):
    """Text to a descriptor, lost without an error once nobody reads it any more.

    `rlhf ... | tee log` and Ctrl-C: tee is gone at once, and the run must still finish its step and save.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        rest = text.encode(errors="replace")
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return len(text)


class Terminal:
    """This process's real output, while descriptors 1 and 2 point to `log_file`.

    `console` writes to the original standard output, `error_console` to the original standard error. Child processes
    inherit the log file as their output. Forked children that go on running Python never reach the terminal either:
    their copies of both consoles write to the log file.
    """

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        flush_output()
        self._kept = {1: os.dup(1), 2: os.dup(2)}
        self._pid = os.getpid()
        self._active = True
        for descriptor in self._kept:
            os.dup2(self._log, descriptor)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        self.console = open_console(LastingStream(self._kept[1]))
        self.error_console = open_console(LastingStream(self._kept[2]))
        os.register_at_fork(after_in_child=self._in_forked_child)

    def restore(self) -> None:
        """Give descriptors 1 and 2 back to the terminal. Does nothing the second time or in a forked child."""
        if not self._active or os.getpid() != self._pid:
            return
        self._active = False
        flush_output()
        for descriptor, kept in self._kept.items():
            os.dup2(kept, descriptor)
        os.close(self._log)
        # The consoles stay usable: their descriptors are still the terminal.

    def _in_forked_child(self) -> None:
        if self._active:
            for kept in self._kept.values():
                os.dup2(self._log, kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unexpected = error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt, UsageError))
        if unexpected:
            traceback.print_exception(error)
        self.restore()
        if unexpected:
            self.error_console.print(f"The log of this process is {self.log_file}", markup=False, soft_wrap=True)


def quiet_process(log_file: Path) -> Terminal:
    """Return the terminal for our own output; descriptors 1 and 2 of this process go to `log_file` (appended) from here
    on.

    Use as a context manager, or call `restore()`. An exception that leaves the block has its trace written to the log
    file, and the path of that file is printed.
    """
    return Terminal(log_file)


def flush_output() -> None:
    """Write out what Python and the C library still hold for standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Libraries that print through C stdio are fully buffered on a file; unflushed, their lines would come out
    # on the terminal after restore().
    ctypes.CDLL(None).fflush(None)
