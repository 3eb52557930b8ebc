"""Cache of tokenized data: one file per combination of rows, tokenizer, settings and code.

The file name is a checksum over all inputs, so entries never become stale. Files unused for a month are removed. A file
is an Arrow stream, the report counts as JSON, the JSON length, and a checksum of everything before it. It is renamed to
its final name when complete.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import tokenizers
import transformers

from rlhf_cli.config.data import OfflineDataConfig, TemplateConfig
from rlhf_cli.config.plugins import contents_of
from rlhf_cli.data.pictures.reading import PictureReader
from rlhf_cli.data.reading.sources import Rows
from rlhf_cli.data.store import StoredTable, TableWriter
from rlhf_cli.environment import user_cache
from rlhf_cli.errors import UsageError
from rlhf_cli.models import vision
from rlhf_cli.models.identity import tokenizer_fingerprint

_FORMAT = 1
"""Version of the file format. The code that writes the files is part of the key."""
_LENGTH_BYTES, _DIGEST_BYTES = 8, 32
AUTO_ROWS = 5_000
"""Minimum number of rows to cache with `auto`: fewer are tokenized in a second or two."""
_UNUSED_SECONDS = 30 * 24 * 3600
_WRITING_SECONDS = 2 * 24 * 3600
"""Maximum age of a temporary file before it counts as abandoned."""
# Disk full, quota exceeded, or above the file size limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Matches only files written here, since users may set a folder with other files.
_KEPT_NAME = re.compile(r"\.?[a-z]+-[0-9a-f]{32}\.(arrow|lock)(?P<writing>\.[0-9a-f]{16})?")
_VISION_CODE = Path(vision.__file__).parent
"""Modules that determine image tokens."""
_NOT_KEYED = {"dataset", "dataset_probs", "dataset_split", "eval_dataset", "eval_split", "max_samples", "data_cache"}
"""Settings that only select rows. The selected rows are part of the key, by content and order."""


def cache_folder(setting: str, num_rows: int) -> Path | None:
    """Return the folder for --data_cache and this number of rows, None if the cache is off."""
    if setting == "off" or (setting == "auto" and num_rows < AUTO_ROWS):
        return None
    if setting == "auto":
        return user_cache("data")
    return Path(setting).expanduser()


def kept_path(
    config: OfflineDataConfig,
    tokenizer: object,
    rows: Rows,
    *,
    kind: str,
    formats: list[str],
    template: TemplateConfig,
    reader: PictureReader | None = None,
) -> Path | None:
    """Return the cache path for these rows, None without caching.

    Rows are not cached if the cache is off, if a source has no checksum, or if the `auto` folder is not writable.

    Raises:
        UsageError: the configured folder is not writable.
    """
    folder = cache_folder(config.data_cache, len(rows))
    # Rows from user code or streams have no checksum, so changes would not be noticed.
    if folder is None or any(table.checksum is None for source in rows.sources for table in source.tables):
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # mkdir succeeds on an existing read-only folder.
        if not os.access(folder, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        if config.data_cache == "auto":
            return None
        raise UsageError(f"--data_cache {config.data_cache} cannot be written: {error.strerror or error}") from error
    return folder / f"{kind}-{_key(config, template, tokenizer, rows, [kind, formats], reader)}.arrow"


def _key(
    config: OfflineDataConfig,
    template: TemplateConfig,
    tokenizer: Any,
    rows: Rows,
    forms: list[object],
    reader: PictureReader | None,
) -> str:
    given = config.model_dump(mode="json") | template.model_dump(mode="json")
    # Settings that only select rows are left out: the selected rows are hashed below.
    settings = {name: value for name, value in given.items() if name not in _NOT_KEYED}
    contents = [[table.checksum() for table in source.tables if table.checksum] for source in rows.sources]
    code = {source.format_code for source in rows.sources if source.format_code is not None}
    contents.append([contents_of(text) for text in sorted(code)])
    # Arrow and the tokenizer libraries may change their output between versions.
    versions = [
        _FORMAT,
        pa.__version__,
        tokenizers.__version__,
        transformers.__version__,
        _code_checksum(Path(__file__).parent),
    ]
    tokens = [tokenizer_fingerprint(tokenizer), tokenizer.chat_template]
    pictures = [] if reader is None else [reader.identity(rows), _code_checksum(_VISION_CODE)]
    facts = json.dumps([*forms, settings, contents, versions, *tokens, *pictures], sort_keys=True)
    # The order of rows is too long for JSON, so hash it as bytes.
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for order in (rows.source_N, rows.index_N):
        digest.update(order.tobytes())
    return digest.hexdigest()


def _code_checksum(folder: Path) -> str:
    """Return a checksum of all modules in a folder."""
    digest = hashlib.blake2b()
    # Sorted, because the order of rglob depends on the file system.
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A cached table, with its report counts."""

    table: StoredTable
    counts: dict[str, object]


def read_kept(path: Path, schema: pa.Schema) -> _Kept | None:
    """Read the cached table at `path`, None if it is missing or damaged."""
    try:
        # Memory-map, so that processes with the same data share the pages.
        with pa.memory_map(str(path)) as mapped:
            kept = _parsed(mapped.read_buffer(), schema)
    # Any error of parsing means a damaged file, which is replaced.
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
    with suppress(OSError):
        os.utime(path)  # mark as used
    return kept


def _parsed(content: pa.Buffer, schema: pa.Schema) -> _Kept:
    end = content.size - _DIGEST_BYTES
    start = end - _LENGTH_BYTES
    if start < 0:
        raise ValueError("cut off")
    # Hash first: Arrow may crash on damaged buffers.
    if hashlib.blake2b(memoryview(content)[:end], digest_size=_DIGEST_BYTES).digest() != content[end:].to_pybytes():
        raise ValueError("altered")
    length = int.from_bytes(content[start:end].to_pybytes(), "little")
    counts = json.loads(content[start - length : start].to_pybytes())
    table = pa.ipc.open_stream(content[: start - length]).read_all()
    # The key should exclude this, but a wrong schema must never be used.
    if table.schema != schema:
        raise ValueError("another schema")
    return _Kept(StoredTable(table), counts)


class KeptTableWriter(TableWriter):
    """Writes a cached table to `path`. Without a call to `keep`, nothing remains."""

    def __init__(self, schema: pa.Schema, path: Path) -> None:
        self._path = path
        # A random name, because several processes may write the same entry.
        self._writing = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        # "x" fails if the file exists instead of overwriting it.
        super().__init__(schema, self._writing.open("x+b"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing writes buffers, which fails on a full disk; the original error is more useful.
        with suppress(OSError):
            self.file.close()
        self._writing.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise UsageError(
                f"cannot cache tokenized data in {self._path.parent}: {error.strerror or error}; "
                "set another folder with --data_cache DIR, or disable it with --data_cache off"
            ) from error

    def keep(self, counts: dict[str, object]) -> StoredTable:
        """Publish everything written under the cache path, and return it as a table."""
        self.close()
        encoded = json.dumps(counts).encode()
        # The length comes last, so that the JSON can be found from the end of the file.
        self.file.write(encoded + len(encoded).to_bytes(_LENGTH_BYTES, "little"))
        self.file.seek(0)
        digest = hashlib.file_digest(self.file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).digest()
        self.file.write(digest)
        self.file.flush()
        table = self.mapped()
        # Rename last, so that other processes never see a partial file.
        self._writing.replace(self._path)
        _remove_unused(self._path.parent)
        return table


def _remove_unused(folder: Path) -> None:
    """Remove files that have not been used for long, and temporary files of killed processes."""
    for path in folder.iterdir():
        known = _KEPT_NAME.fullmatch(path.name)
        if known is None:
            continue
        allowed = _WRITING_SECONDS if known["writing"] else _UNUSED_SECONDS
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > allowed:
                path.unlink()
