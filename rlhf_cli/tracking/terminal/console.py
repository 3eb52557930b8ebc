"""Reserves the terminal for this program's messages. All other output of a process goes to a log file.

Redirects file descriptors instead of `sys.stdout`, to include C libraries, worker processes and launchers. progress.py
decides which messages the terminal shows.
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


class _TerminalConsole(Console):
    """A rich console that reads the size from its stream.

    rich queries descriptors 0, 1 and 2, but 1 and 2 are redirected to the log file and 0 may not be a terminal.
    """

    # rich also defines a setter, which is left out: the size always comes from the terminal.
    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        """Return the terminal's columns and rows, or 80 x 25 without a terminal."""
        if not self.is_terminal:
            return super().size
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return super().size
        return ConsoleDimensions(columns or 80, rows or 25)


def open_console(stream: io.TextIOBase) -> Console:
    """Create a console on `stream`: colors and live views on a terminal, otherwise plain text without escape codes."""
    file = cast(TextIO, stream)
    interactive = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    if interactive:
        return _TerminalConsole(file=file, force_terminal=True, highlight=False)
    # soft_wrap keeps each message on one line, as tools that read scheduler logs expect.
    return _TerminalConsole(
        file=file, force_terminal=False, force_interactive=False, color_system=None, highlight=False, soft_wrap=True
    )


class LastingStream(io.TextIOBase):
    """Text stream to a descriptor that ignores a closed reader.

    With `rlhf ... | tee log` and Ctrl-C, tee exits at once, but the run must still finish its step and save.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        rest = text.encode(errors="replace")
        # os.write may write less than requested, to a pipe that is nearly full.
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return len(text)


class _Terminal:
    """The process's original output, while descriptors 1 and 2 are redirected to `log_file`.

    `console` writes to the original stdout, `error_console` to the original stderr. Child processes inherit the log
    file. Forked children never reach the terminal either: both consoles write to the log file there.
    """

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # Before the redirection: buffered text belongs on the terminal.
        _flush_output()
        self._kept = {1: os.dup(1), 2: os.dup(2)}
        self._pid = os.getpid()
        self._active = True
        for descriptor in self._kept:
            os.dup2(self._log, descriptor)
        # On a file, Python buffers by block. By line, messages from all processes stay in order.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        self.console = open_console(LastingStream(self._kept[1]))
        self.error_console = open_console(LastingStream(self._kept[2]))
        os.register_at_fork(after_in_child=self._in_forked_child)

    def restore(self) -> None:
        """Point descriptors 1 and 2 back to the terminal. No-op on later calls and in forked children."""
        if not self._active or os.getpid() != self._pid:
            return
        self._active = False
        _flush_output()
        for descriptor, kept in self._kept.items():
            os.dup2(kept, descriptor)
        os.close(self._log)
        # Do not close `_kept`: the consoles still write to it.

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


def quiet_process(log_file: Path) -> _Terminal:
    """Redirect descriptors 1 and 2 of this process to `log_file` (append mode). Returns the terminal for our messages.

    Use it as a context manager, or call `restore()`. If an exception leaves the block, the traceback is written to the
    log file and the path of the log file is printed.
    """
    return _Terminal(log_file)


def _flush_output() -> None:
    """Flush stdout and stderr, in Python and in the C library."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # C stdio is fully buffered on a file: without this, lines that C libraries printed would appear on the terminal
    # after restore().
    ctypes.CDLL(None).fflush(None)
