"""Completions of judges in a file, by content of the request."""

import hashlib
import json
import logging
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlhf_cli.errors import UsageError

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 10.0
"""Wait for another process that writes to the same file."""


class CompletionCache:
    """Completions with a valid verdict, in an SQLite file that several runs may share.

    After an error, such as a full disk, it is not used any more; judges are then asked as without a cache.

    Raises UsageError on construction if the file cannot be used.
    """

    def __init__(self, path: str) -> None:
        self._path, self._is_broken = path, False
        try:
            # Opened by the main thread, then used only by the client's thread.
            self._file = sqlite3.connect(Path(path).expanduser(), timeout=_BUSY_SECONDS, check_same_thread=False)
            # With a write-ahead log, an entry costs no wait for the disk, and the file survives a crash.
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS completions (request TEXT PRIMARY KEY, text TEXT NOT NULL)")
            self._file.commit()
        except sqlite3.Error as error:
            raise UsageError(f"--judge_cache {path} cannot be used: {error}") from error

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._file.close()

    def completion_of(self, request: Mapping[str, object]) -> str | None:
        """Return the stored completion of an equal request, None without one."""
        if self._is_broken:
            return None
        try:
            found = self._file.execute("SELECT text FROM completions WHERE request = ?", (_key(request),)).fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        return None if found is None else str(found[0])

    def store(self, request: Mapping[str, object], completion: str) -> None:
        """Store a completion."""
        if self._is_broken:
            return
        try:
            # Lone surrogates, which JSON allows, are not stored as they are.
            stored = completion.encode(errors="replace").decode()
            self._file.execute("INSERT OR REPLACE INTO completions VALUES (?, ?)", (_key(request), stored))
            self._file.commit()
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: sqlite3.Error) -> None:
        self._is_broken = True
        logger.warning("--judge_cache %s is not used any more: %s", self._path, error)


def _key(request: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
