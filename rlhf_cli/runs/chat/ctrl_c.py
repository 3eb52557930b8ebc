"""Ctrl-C in a chat: it stops an answer, and it interrupts the person's typing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CtrlC:
    """Whether Ctrl-C was pressed since the last look. While a line is read, it raises KeyboardInterrupt instead."""

    def __init__(self) -> None:
        self._was_pressed = False
        self._is_raised = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Take Ctrl-C within the block; without it, Ctrl-C ends the program as ever."""
        previous = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let Ctrl-C raise KeyboardInterrupt within the block."""
        self._is_raised = True
        try:
            yield
        finally:
            self._is_raised = False

    def __call__(self) -> bool:
        """Return whether Ctrl-C was pressed."""
        return self._was_pressed

    def take(self) -> bool:
        """Return whether Ctrl-C was pressed, and forget it."""
        was_pressed, self._was_pressed = self._was_pressed, False
        return was_pressed

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_raised:
            raise KeyboardInterrupt
        self._was_pressed = True
