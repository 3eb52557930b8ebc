"""Weight pushes through shared-memory files: the trainer writes buckets, and each engine on the machine maps them.

The driver forwards the manifest to the engines. Engines on other machines cannot read the files.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rlhf_cli.backends.weight_sync.transfer import Ledger, NamedTensors, check_arrived, check_tensors
from rlhf_cli.errors import OutOfMemory, RunError, Shortage

# Large enough that per-file costs are negligible, small enough to stay a fraction of host memory.
_BUCKET_BYTES = 256 << 20
# Bytes. Views require their dtype's alignment; a full cache line makes copies faster.
_ALIGNMENT = 64
_PREFIX = "rlhf-weights-"
_LOCK = "lock"
_YOUNG_SECONDS = 60.0
"""A folder without a lock file may still be under construction if it is younger than this."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _folder_with_room(num_bytes: int, folders: tuple[str, ...]) -> Path:
    """Return the first existing folder with enough space; in containers, /dev/shm often has only 64 MiB."""
    for folder in folders:
        if os.path.isdir(folder) and shutil.disk_usage(folder).free > num_bytes:
            return Path(folder)
    raise _no_space(f"for {num_bytes / 2**20:.0f} MiB in {' or '.join(folders)}")


def _no_space(where: str, detail: str = "") -> OutOfMemory:
    return OutOfMemory("weight push: ", Shortage("space in /dev/shm", where, detail=detail))


class _Bucket:
    """One open file with the matching manifest entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.tensors: list[dict[str, object]] = []
        # 0o600: weights may be confidential, and /dev/shm is readable by every user.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb", buffering=0)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        on_host = tensor.cpu().contiguous()
        raw = on_host.view(-1).view(torch.uint8).numpy()
        entry = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        self.tensors.append(entry | {"offset": self.size})
        self._file.seek(self.size)
        left = memoryview(raw)
        # Linux writes at most 2 GiB per call, and embeddings can be larger.
        while left:
            left = left[self._file.write(left) :]
        self.size = _aligned(self.size + raw.nbytes)

    def close(self) -> dict[str, object]:
        # The last tensor may end before the aligned size, and the reader maps exactly `size` bytes.
        os.ftruncate(self._file.fileno(), self.size)
        self._file.close()
        return {"path": str(self.path), "size": self.size, "tensors": self.tensors}


class _Place:
    """Private folder for one push, locked while the owner process is alive."""

    def __init__(self, parent: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unlocked = self.path / f"{_LOCK}.new"
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Rename after locking: no process may see an unlocked lock file, or it would delete the folder.
        unlocked.rename(self.path / _LOCK)

    def remove(self) -> None:
        # Remove first: closing releases the lock, after which other processes treat the folder as stale.
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class ShmTransport:
    """Writes pushes as buckets of bounded size. `close` or the next push removes the files.

    Buckets are stored in /dev/shm, or in the temporary folder if /dev/shm is missing or full. Engines map the files, so
    an engine can finish reading a removed push.
    """

    def __init__(self, *, bucket_bytes: int = _BUCKET_BYTES, folders: tuple[str, ...] | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._folders = folders or ("/dev/shm", tempfile.gettempdir())
        self._places: dict[Path, _Place] = {}
        _remove_stale_pushes(self._folders)

    def send(self, named_tensors: NamedTensors, *, version: int) -> dict[str, Any]:
        """Write a push and return the manifest. Raises OutOfMemory if no folder has enough space."""
        # Remove the previous push first: two pushes at once may exceed the space.
        self.close()
        try:
            return {"version": version, "buckets": list(self._buckets(named_tensors, version))}
        except OSError as error:
            self.close()
            if error.errno == errno.ENOSPC:
                raise _no_space("while a bucket was written", str(error)) from error
            raise RunError(f"weight push: writing failed: {error}") from error
        except BaseException:
            self.close()
            raise

    def _buckets(self, named_tensors: NamedTensors, version: int) -> Iterator[dict[str, object]]:
        bucket: _Bucket | None = None
        count = 0
        for name, tensor in named_tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            if bucket is not None and bucket.size + num_bytes > self._bucket_bytes:
                yield bucket.close()
                bucket = None
            if bucket is None:
                folder = _folder_with_room(max(self._bucket_bytes, num_bytes), self._folders)
                if folder not in self._places:
                    self._places[folder] = _Place(folder)
                bucket = _Bucket(self._places[folder].path / f"v{version}-{count:04d}")
                count += 1
            bucket.add(name, tensor)
        if bucket is not None:
            yield bucket.close()

    def close(self) -> None:
        """Remove the latest push's files."""
        for place in self._places.values():
            place.remove()
        self._places.clear()


def _remove_stale_pushes(folders: tuple[str, ...]) -> None:
    """Remove pushes left by killed trainers.

    The kernel releases file locks when a process dies. Process IDs would be unreliable: each container numbers
    processes separately.
    """
    for folder in folders:
        for path in Path(folder).glob(f"{_PREFIX}*"):
            # The folder may belong to another user, or the owner may remove it at this moment.
            with suppress(OSError):
                if _is_stale(path):
                    shutil.rmtree(path)


def _is_stale(place: Path) -> bool:
    """Return whether the process that owns a push folder is gone."""
    # LOCK_NB fails at once if the owner still holds the lock; on success, closing the file releases it again.
    try:
        with (place / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return time.time() - place.stat().st_mtime > _YOUNG_SECONDS
    except BlockingIOError:
        return False
    return True


def _map_bucket(bucket: dict[str, Any]) -> torch.Tensor:
    path = Path(bucket["path"])
    if not path.exists():
        raise RunError(
            f"weight push: {path} does not exist here; shm reaches only engines on the trainer's machine "
            "that share its /dev/shm: use --vllm_sync_backend nccl across machines and containers"
        )
    if path.stat().st_size != bucket["size"]:
        raise RunError(f"weight push: {path} has {path.stat().st_size} bytes, {bucket['size']} were announced")
    # A private mapping (copy-on-write): an engine that modifies a weight in place does not change the others' data.
    return torch.from_file(str(path), shared=False, size=bucket["size"], dtype=torch.uint8)


def read_push(manifest: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Map a push's tensors without copying. Raises RunError if a file is missing or truncated."""
    named_tensors = []
    for bucket in manifest["buckets"]:
        raw = _map_bucket(bucket)
        for entry in bucket["tensors"]:
            dtype = getattr(torch, entry["dtype"])
            num_bytes = dtype.itemsize * torch.Size(entry["shape"]).numel()
            part = raw[entry["offset"] : entry["offset"] + num_bytes]
            named_tensors.append((entry["name"], part.view(dtype).view(entry["shape"])))
    return named_tensors


def read_verified_push(
    manifest: dict[str, object], expected: dict[str, tuple[int, ...]], *, optional: frozenset[str] = frozenset()
) -> tuple[list[tuple[str, torch.Tensor]], int]:
    """Return a push's tensors and checksum, after verifying names, shapes, count and checksum.

    Raises RunError with the mismatch. Verification changes nothing, so the engine keeps the previous weights.
    """
    named_tensors = read_push(manifest)
    if expected:
        check_tensors({name: tuple(tensor.shape) for name, tensor in named_tensors}, expected, optional=optional)
    ledger = Ledger()
    for name, tensor in named_tensors:
        ledger.add(name, tensor)
    check_arrived(ledger, manifest)
    return named_tensors, ledger.checksum
