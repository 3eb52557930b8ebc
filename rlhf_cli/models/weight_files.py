"""Weights of a Hugging Face folder, read one tensor at a time, and a fingerprint that distinguishes models.

loading.py builds models from them, merging.py writes folders of them.
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

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files of a Hub repository besides its weights."""
NOT_READ = ["*/*", "consolidated*"]
"""Files of a Hub repository that transformers does not read: other forms of the same weights, as large again."""
WHOLE_BYTES = 64 << 10
"""Tensors up to this size are fingerprinted whole: norms and biases always, since training may change little else."""
PIECE_BYTES, NUM_PIECES = 1 << 10, 16
"""Of larger tensors: a billion bytes of an embedding would take a second, and hundreds of experts minutes."""


class TensorSource(Protocol):
    """Named tensors that are read when they are asked for."""

    def names(self) -> list[str]:
        """Return all names, in the order in which they are best read."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor, in memory of its own or of the file."""
        ...


class SafetensorsFiles:
    """Tensors of .safetensors files."""

    def __init__(self, files: list[Path]) -> None:
        self._files = [safe_open(file, framework="pt") for file in files]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (no mapping)

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        stored = self._file_of[name].get_slice(name).get_dtype()
        return TYPES[stored] if stored in TYPES else self.read(name).dtype

    def read(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)


class TorchFiles:
    """Tensors of pytorch_model.bin files, mapped into memory rather than read if the file allows it."""

    def __init__(self, files: list[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            can_be_mapped = zipfile.is_zipfile(file)  # files of torch before 1.6 are none
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
    """The tensors of a source under other names."""

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
    """Some tensors of a source in another type."""

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
    """The tensors of two sources, which have no name in common."""

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


def open_weights(folder: Path) -> SafetensorsFiles | TorchFiles:
    """Return the weights of a model's folder. Raise UsageError if there are none or some files are missing."""
    for single, reader in (("model.safetensors", SafetensorsFiles), ("pytorch_model.bin", TorchFiles)):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return reader([folder / single])
        if index.is_file():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            if missing := [file.name for file in files if not file.is_file()]:
                raise UsageError(f"{folder} lacks {len(missing)} of its files of weights, the first is {missing[0]}")
            return reader(files)
    raise UsageError(f"{folder} has no weights (model.safetensors)")


def folder_of(path: str) -> Path:
    """Return the local folder of a resolved model path; a Hub name is fetched, or found in the cache."""
    if Path(path).is_dir():
        return Path(path)
    folder = _fetched(path, "*.safetensors", *BESIDE_WEIGHTS)
    return folder if list(folder.glob("*.safetensors")) else _fetched(path, "pytorch_model*", *BESIDE_WEIGHTS)


def description_of(path: str) -> Path:
    """Return the local folder of a resolved model path; of a Hub name all but the weights is fetched."""
    return Path(path) if Path(path).is_dir() else _fetched(path, *BESIDE_WEIGHTS)


def _fetched(name: str, *patterns: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=NOT_READ))
    except OSError as error:
        raise UsageError(f"model {name!r}: not a local folder, and the Hub gave none ({error})") from error


def fingerprint(folder: Path) -> str:
    """Return a hash of the weights of a folder, which changes if they do; copies and other cuts of files are alike."""
    return fingerprint_of(open_weights(folder))


def fingerprint_of(weights: TensorSource) -> str:
    """Return a hash of names, types, shapes and bytes of tensors: all of small ones, pieces all over large ones."""
    digest = hashlib.sha256()
    for name in sorted(weights.names()):
        digest.update(f"{name} {weights.dtype(name)} {weights.shape(name)}".encode())
        for piece in _pieces(weights.read(name)):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _pieces(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield bytes of the tensor; only the pages of the file that they are on are read."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
    if raw.size <= WHOLE_BYTES:
        yield raw.tobytes()
        return
    for start in np.linspace(0, raw.size - PIECE_BYTES, NUM_PIECES, dtype=np.int64):
        yield raw[start : start + PIECE_BYTES].tobytes()
