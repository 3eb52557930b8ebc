"""Weights of a Hugging Face folder, read one tensor at a time, and a fingerprint that tells models apart.

Leaves out building models from them (loading) and writing folders of them (merging).
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

from rlhf_cli.errors import UsageError

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files of a Hub repository besides its weights."""


class TensorSource(Protocol):
    """Named tensors that are read when they are asked for."""

    def names(self) -> list[str]:
        """All names, in the order in which they are best read."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in memory of its own or of the file."""
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

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Some rows of a tensor, without reading the others."""
        return self._file_of[name].get_slice(name)[start:stop]


class TorchFiles:
    """Tensors of pytorch_model.bin files, mapped into memory rather than read."""

    def __init__(self, files: list[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            self._tensors |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Some rows of a tensor."""
        return self._tensors[name][start:stop]


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


def open_weights(folder: Path) -> SafetensorsFiles | TorchFiles:
    """The weights of a model's folder. UsageError where there are none or some files are missing."""
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
    """The local folder of a resolved model path; a Hub name is fetched, or found in the cache."""
    if Path(path).is_dir():
        return Path(path)
    try:
        folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", *BESIDE_WEIGHTS]))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(path, allow_patterns=["pytorch_model*", *BESIDE_WEIGHTS]))
    except OSError as error:
        raise UsageError(f"model {path!r}: not a local folder, and the Hub gave none ({error})") from error
    return folder


def fingerprint(folder: Path) -> str:
    """A hash of names, types, shapes and the first and last row of every weight: models apart, copies alike."""
    weights = open_weights(folder)
    digest = hashlib.sha256()
    for name in sorted(weights.names()):
        shape = weights.shape(name)
        digest.update(f"{name} {weights.dtype(name)} {shape}".encode())
        for rows in _ends(weights, name, shape):
            digest.update(rows.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _ends(weights: Any, name: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    if not shape:
        return [weights.read(name).reshape(1)]
    if len(shape) == 1:
        return [weights.read(name)]
    return [weights.rows(name, 0, 1), weights.rows(name, shape[0] - 1, shape[0])]
