"""JSON decoder, and positions of list elements in a file, found with a sliding window.

Only each element's start is stored, so files may be large. Columns have no meaning here.
"""

import codecs
import json
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlhf_cli.data.formats.dialogues import is_bare_dialogue, row_of_dialogue
from rlhf_cli.data.templates.turn_spans import skip_space
from rlhf_cli.errors import UsageError

WINDOW = 1 << 20
"""Bytes decoded at a time. Longer elements enlarge the window."""
LONGEST_WORD = 16
"""Characters before the window's end in which an error may be caused by truncation, for example of '-Infinity' or
'\\ud83d\\ude00'.
"""
_BLOCK = 1 << 26
"""Block size in bytes for counting characters, which bounds the memory of the comparison."""
_BOM = codecs.BOM_UTF8


def _constant(name: str) -> float | None:
    """pandas writes NaN for an empty cell."""
    return None if name == "NaN" else float(name)


DECODER = json.JSONDecoder(parse_constant=_constant)


def element_bounds(mapped: mmap.mmap, path: str, *, window: int = WINDOW) -> Iterator[int]:
    """Yield the byte at which each list element starts, then the byte after the last one. Parses each element once.

    `window` is the number of bytes decoded at a time, at least 8 so that it can grow.

    Raises:
        UsageError: the file is not a list of objects; the message contains line and column, or the row.
    """
    # The first bracket has been checked by the caller.
    cursor, number = _Cursor(mapped, path, mapped.find(b"[") + 1, window), 0
    while cursor.next_character() != "]" or number:
        yield cursor.byte
        where = f"{path} row {number}"
        checked_object(cursor.value(where), where)
        number += 1
        following = cursor.next_character()
        if following == "]":
            break
        if following != ",":
            raise cursor.fault("Expecting ',' or ']' after a row")
        cursor.skip(1)
    yield cursor.byte
    cursor.skip(1)
    if cursor.next_character():
        raise cursor.fault("Extra data after the list")


class _Cursor:
    """Reads text through a window, and tracks the byte position of the next character."""

    def __init__(self, mapped: mmap.mmap, path: str, byte: int, window: int) -> None:
        self._mapped, self._path, self._window = mapped, path, window
        self.byte = byte
        self._move(window)

    def _move(self, size: int) -> None:
        """Start the window at the next character, with `size` bytes."""
        self._end = min(self.byte + size, len(self._mapped))
        self._is_last = self._end == len(self._mapped)
        try:
            # The window may end within a character, which is decoded with the next window.
            text, used = codecs.utf_8_decode(self._mapped[self.byte : self._end], "strict", self._is_last)
        except UnicodeDecodeError as error:
            place = self.byte + error.start
            raise UsageError(f"{self._path} is not UTF-8 text: {error.reason} at byte {place}") from error
        self._text, self._position, self._end = text, 0, self.byte + used

    def skip(self, count: int) -> None:
        """Advance by `count` characters within the window."""
        stop = self._position + count
        # Track bytes, because characters have different lengths.
        self.byte += len(self._text[self._position : stop].encode())
        self._position = stop

    def next_character(self) -> str:
        """Advance to the next non-space character and return it; '' at the end of the file."""
        while True:
            self.skip(skip_space(self._text, self._position) - self._position)
            if self._position < len(self._text) or self._is_last:
                return self._text[self._position : self._position + 1]
            self._move(self._window)

    def value(self, where: str) -> object:
        """Parse the value at the current position and advance past it. Errors without a column contain `where`
        instead.
        """
        while True:
            try:
                value, stop = DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                # An error near the end of the window may be caused by the cut, so enlarge the window.
                if self._is_last or not self._is_of_the_cut(error):
                    raise self.fault(error.msg, error.pos - self._position) from error
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where} {beyond_limits(error)}") from error
            else:
                if self._is_last or stop < len(self._text):  # a number at the end may continue in the next window
                    self.skip(stop - self._position)
                    return value
            # Double the window, so that long elements take logarithmically many attempts.
            self._move(max(self._window, 2 * (self._end - self.byte)))

    def _is_of_the_cut(self, error: json.JSONDecodeError) -> bool:
        """Return whether truncation may have caused the error. An unterminated string is reported at its start."""
        return error.pos >= len(self._text) - LONGEST_WORD or error.msg.startswith("Unterminated string")

    def fault(self, message: str, ahead: int = 0) -> UsageError:
        """Return an error about the next character, or about a character `ahead` of it."""
        before = self._text[self._position : self._position + ahead]
        line, column = _line_and_column(self._mapped, self.byte + len(before.encode()))
        return UsageError(f"{self._path} line {line} is not valid JSON: {message} at column {column}")


def _line_and_column(mapped: mmap.mmap, byte: int) -> tuple[int, int]:
    """Return line and column of a byte, from 1. Columns count characters, excluding a byte order mark."""
    start = mapped.rfind(b"\n", 0, byte) + 1
    line = 1 + sum(block.count(b"\n") for _, block in blocks(mapped, 0, start))
    within = sum(_num_characters(block) for _, block in blocks(mapped, start, byte))
    # The mark counts as a character of the first line, but editors hide it.
    return line, 1 + within - (start == 0 and mapped[: len(_BOM)] == _BOM)


def _num_characters(block: bytes) -> int:
    """Return the number of characters that start in these UTF-8 bytes."""
    # Continuation bytes start with the bits 10.
    return int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) & 0xC0 != 0x80))


def blocks(mapped: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes from `start` to `stop` in blocks of bounded size, with each block's position."""
    for first in range(start, stop, _BLOCK):
        yield first, mapped[first : min(first + _BLOCK, stop)]


def checked_object(row: Any, where: str) -> dict[str, object]:
    """Return the row if it is an object or message list. Raises UsageError otherwise."""
    if is_bare_dialogue(row):
        return row_of_dialogue(row)
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {json.dumps(row):.40}, expected an object with columns: {{...}}")
    return row


def beyond_limits(error: ValueError | RecursionError) -> str:
    """Return why Python rejects valid JSON."""
    deep = isinstance(error, RecursionError)
    return "is nested too deeply" if deep else "has a whole number of too many digits: write it as text"
