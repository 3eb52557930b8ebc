"""Convert GGUF files once into Hugging Face folders, which all commands and engines can read.

The folder is cached under a hash of the file, so a changed file is converted again. Quantized weights become bf16, the
usual dtype of published models; other weights keep their dtype.
"""

import hashlib
import importlib.metadata
import mmap
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rlhf_cli.environment import user_cache
from rlhf_cli.errors import UsageError, one_line
from rlhf_cli.models.folders import one_at_a_time, whole_folder

_MAGIC = b"GGUF"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_TYPES = "gguf_types.txt"
"""File in a converted folder with the tensor types of the GGUF file."""
_LAYOUT = 2
"""Version of a converted folder's contents, part of its hash: a folder of another version is not read."""
_HEAD_BYTES, _PIECE_BYTES, _NUM_PIECES = 16 << 20, 1 << 10, 4096
"""Hashed parts of a file: the start, with metadata and tensor names, and evenly spaced samples."""
_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_described: set[Path] = set()


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file for a path, or None.

    It is the file itself, or the only one in a folder without other weights.

    Raises:
        UsageError: the folder contains more than one, or the file is missing, incomplete or not GGUF.
    """
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1 and not _SHARD.search(files[0].name):
            names = ", ".join(file.name for file in files)
            raise UsageError(f"pretrain {str(path)!r} contains more than one GGUF file: use the path of one of {names}")
        path = files[0] if files else path
    if path.suffix != ".gguf" or path.is_dir():
        return None
    if not path.is_file():
        raise UsageError(f"pretrain {str(path)!r}: there is no such file")
    if _SHARD.search(path.name):
        raise UsageError(
            f"pretrain {str(path)!r} is a shard: merge the shards with llama.cpp's `llama-gguf-split --merge`"
        )
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UsageError(f"pretrain {str(path)!r} is not a GGUF file: it does not start with GGUF")
    return path


def converted(file: Path) -> Path:
    """Return the Hugging Face folder for a GGUF file, and describe it on stderr once per process.

    Raises:
        UsageError: the gguf package is missing, or transformers cannot read the model.
    """
    folder = user_cache("gguf") / _digest(file)
    if not folder.is_dir():
        _convert(file, folder)
    # Only one rank prints: with torchrun or DeepSpeed, every process reaches this line.
    if folder not in _described and os.environ.get("RANK", "0") == "0":
        _described.add(folder)
        types = (folder / _TYPES).read_text(encoding="utf-8").split()
        print(f"{file.name}: {_description(types)}, in {folder}", file=sys.stderr)
    return folder


def _digest(file: Path) -> str:
    # A new transformers release may convert differently. Importing it just for the version would take seconds.
    converter = importlib.metadata.version("transformers")
    digest = hashlib.sha256(f"{_LAYOUT} {converter} {file.stat().st_size}".encode())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        digest.update(contents[:_HEAD_BYTES])
        for start in _piece_starts(len(contents)):
            digest.update(contents[start : start + _PIECE_BYTES])
    return digest.hexdigest()[:32]


def _piece_starts(size: int) -> Iterator[int]:
    # Small files are hashed in full.
    step = max(_PIECE_BYTES, (size - _HEAD_BYTES) // _NUM_PIECES)
    yield from range(_HEAD_BYTES, size, step)


def _convert(file: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UsageError(
            f"pretrain {str(file)!r} is a GGUF file, and the package gguf is not installed (extra `gguf`, or "
            "`pip install gguf`)"
        ) from None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # All ranks convert at the same time. The first one does the work, the rest find the folder.
        with one_at_a_time(folder):
            if not folder.is_dir():
                with whole_folder(folder) as written:
                    _write(file, written)
    # A damaged file can raise almost anything in gguf or transformers.
    except Exception as error:
        raise UsageError(f"pretrain {str(file)!r} cannot be converted to {folder}: {one_line(error)}") from error


def _write(file: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    types = sorted({tensor.tensor_type.name for tensor in GGUFReader(str(file)).tensors})
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=_dtype(types), **_whole_weights())
    # The weights are dequantized, but transformers refuses to save a model that still has its quantizer.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    (folder / _TYPES).write_text(" ".join(types), encoding="utf-8")


def _quantized(types: list[str]) -> list[str]:
    return [name for name in types if name not in _PLAIN_TYPES]


def _dtype(types: list[str]) -> str:
    return "bfloat16" if _quantized(types) else _PLAIN_TYPES[_plain(types)]


def _plain(types: list[str]) -> str:
    return next(name for name in ("BF16", "F16", "F32") if name in types)


def _description(types: list[str]) -> str:
    if quantized := _quantized(types):
        return f"weights dequantized from {', '.join(quantized)} to bf16"
    return f"{_plain(types)} weights converted to a Hugging Face folder"


def _whole_weights() -> dict[str, object]:
    """Return the `from_pretrained` argument that dequantizes: newer transformers versions may keep weights packed."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
