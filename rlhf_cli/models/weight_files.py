"""Read weights from a Hugging Face folder one tensor at a time, and compute fingerprints of models.

loading.py builds models from these weights, merging.py writes them.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

from rlhf_cli.errors import UsageError

_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files in a Hub repository other than weights."""
_NOT_READ = ["*/*", "consolidated*"]
"""Hub files that transformers does not read: other formats of the same weights, which would double the download."""
WHOLE_BYTES = 64 << 10
"""Tensors up to this size are hashed in full: norms and biases may be the only weights that training changes."""
PIECE_BYTES, NUM_PIECES = 1 << 10, 16
"""Sample size for larger tensors: hashing a 1 GB embedding in full takes a second, hundreds of experts take minutes."""


class TensorSource(Protocol):
    """Named tensors, read on demand."""

    def names(self) -> list[str]:
        """Return all names, in the most efficient read order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> torch.Tensor:
        """Return the full tensor, either a copy or a view of the file."""
        ...


class SafetensorsFiles:
    """Tensors in .safetensors files."""

    def __init__(self, files: list[Path]) -> None:
        # safe_open reads only the header; each get_tensor reads one tensor.
        self._files = [safe_open(file, framework="pt") for file in files]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (no mapping)

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        # A slice exposes the dtype without reading data. _TYPES lists the common dtypes; for the rest, read the tensor.
        stored = self._file_of[name].get_slice(name).get_dtype()
        return _TYPES[stored] if stored in _TYPES else self.read(name).dtype

    def read(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)


class _TorchFiles:
    """Tensors in pytorch_model.bin files, memory-mapped if the file format allows it."""

    def __init__(self, files: list[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            # torch.load can only map zip archives; torch before 1.6 wrote another format.
            can_be_mapped = zipfile.is_zipfile(file)
            self._tensors |= torch.load(file, map_location="cpu", mmap=can_be_mapped, weights_only=True)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class RenamedTensors:
    """A source with renamed tensors."""

    def __init__(self, source: TensorSource, rename: Callable[[str], str]) -> None:
        self._source = source
        self._own_name = {rename(name): name for name in source.names()}

    def names(self) -> list[str]:
        return list(self._own_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._own_name[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._own_name[name])

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(self._own_name[name])


class ConvertedTensors:
    """A subset of a source, converted to another dtype."""

    def __init__(self, source: TensorSource, names: list[str], dtype: torch.dtype) -> None:
        self._source, self._names, self._dtype = source, names, dtype

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(name).to(self._dtype)


class JoinedTensors:
    """Two sources with disjoint names, combined."""

    def __init__(self, first: TensorSource, second: TensorSource) -> None:
        self._names = [*first.names(), *second.names()]
        self._source_of = dict.fromkeys(first.names(), first) | dict.fromkeys(second.names(), second)

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source_of[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source_of[name].dtype(name)

    def read(self, name: str) -> torch.Tensor:
        return self._source_of[name].read(name)


def open_weights(folder: Path) -> SafetensorsFiles | _TorchFiles:
    """Open the weights in a model folder. Raises UsageError if files are missing."""
    for single, reader in (("model.safetensors", SafetensorsFiles), ("pytorch_model.bin", _TorchFiles)):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return reader([folder / single])
        if index.is_file():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            if missing := [file.name for file in files if not file.is_file()]:
                raise UsageError(f"{folder} lacks {len(missing)} weight files, first {missing[0]}")
            return reader(files)
    raise UsageError(f"{folder} has no weights (model.safetensors)")


def num_bytes(source: TensorSource, name: str, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a tensor if it is written as `dtype`, by default unchanged."""
    return torch.Size(source.shape(name)).numel() * written_type(source, name, dtype).itemsize


def plan_shards(
    source: TensorSource, names: list[str], *, max_bytes: int, dtype: torch.dtype | None = None
) -> list[list[str]]:
    """Split tensor names into shards: in this order, as many as fit into `max_bytes`, at least one each."""
    shards: list[list[str]] = []
    # Pretend that the previous shard is full, so the first tensor opens a shard.
    size = max_bytes
    for name in names:
        added = num_bytes(source, name, dtype)
        if not shards or size + added > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += added
    return shards


def written_type(source: TensorSource, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """Return the output dtype of a tensor: the requested one for floating-point tensors, otherwise the source dtype."""
    own = source.dtype(name)
    return dtype if dtype is not None and own.is_floating_point else own


def folder_of(path: str) -> Path:
    """Return the local folder for a resolved model path; a Hub model is downloaded or found in the cache."""
    if Path(path).is_dir():
        return Path(path)
    # Most repositories have safetensors; download the torch files only without them.
    folder = _fetched(path, "*.safetensors", *_BESIDE_WEIGHTS)
    return folder if list(folder.glob("*.safetensors")) else _fetched(path, "pytorch_model*", *_BESIDE_WEIGHTS)


def description_of(path: str) -> Path:
    """Return the local folder for a resolved model path. From the Hub, download everything except weights."""
    return Path(path) if Path(path).is_dir() else _fetched(path, *_BESIDE_WEIGHTS)


def _fetched(name: str, *patterns: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=_NOT_READ))
    except OSError as error:
        raise UsageError(f"model {name!r}: not a local folder, and not available from the Hub ({error})") from error


def fingerprint(folder: Path) -> str:
    """Hash the weights in a folder. Copies and different shard layouts have the same hash."""
    return fingerprint_of(open_weights(folder))


def fingerprint_of(weights: TensorSource) -> str:
    """Hash tensor names, dtypes, shapes and bytes: all bytes of small tensors, evenly spaced samples of large ones."""
    digest = hashlib.sha256()
    # Sorted, so the shard layout does not matter. Checkpoints store this hash: do not change what it covers.
    for name in sorted(weights.names()):
        digest.update(f"{name} {weights.dtype(name)} {weights.shape(name)}".encode())
        for piece in _pieces(weights.read(name)):
            digest.update(piece)
    # 128 bits exclude accidental collisions and keep run identities short.
    return digest.hexdigest()[:32]


def _pieces(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield the bytes to hash. With memory-mapped files, only the sampled pages are read."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    if raw.size <= WHOLE_BYTES:
        yield raw.tobytes()
        return
    # Spread over the full tensor, including both ends: an adapter merge or sparse update may touch only some rows.
    for start in np.linspace(0, raw.size - PIECE_BYTES, NUM_PIECES, dtype=np.int64):
        yield raw[start : start + PIECE_BYTES].tobytes()
