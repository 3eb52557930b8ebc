"""Ctrl-C handling in a chat: it stops an answer or interrupts input."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CtrlC:
    """Tracks Ctrl-C. While a line is read, Ctrl-C raises KeyboardInterrupt instead."""

    def __init__(self) -> None:
        self._was_pressed = False
        self._is_raised = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGINT within the block. Outside, Ctrl-C ends the program as usual."""
        previous = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on Ctrl-C within the block."""
        self._is_raised = True
        try:
            yield
        finally:
            self._is_raised = False

    def __call__(self) -> bool:
        """Return whether Ctrl-C was pressed."""
        return self._was_pressed

    def take(self) -> bool:
        """Return whether Ctrl-C was pressed, and reset."""
        was_pressed, self._was_pressed = self._was_pressed, False
        return was_pressed

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_raised:
            raise KeyboardInterrupt
        # Only a flag, which generation checks between tokens: the answer so far stays usable.
        self._was_pressed = True
