"""Models in GGUF files, converted once into Hugging Face folders.

All commands and engines then read the folder as they read any other. It is kept in the user's cache under a hash of the
file, so a file that changes is converted again. Quantised weights become bf16, the type in which models are published;
weights that are not quantised keep their type.
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

MAGIC = b"GGUF"
SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
NOTE = "converted_from.txt"
"""File of a converted folder: the sentence about it that every run prints."""
HEAD_BYTES, PIECE_BYTES, NUM_PIECES = 16 << 20, 1 << 10, 4096
"""Hashed parts of a file: its beginning, which holds metadata and names of tensors, and pieces all over it."""
PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_described: set[Path] = set()


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path stands for, itself or the only one in a folder without other weights; else
    None.

    Raises:
        UsageError: the folder has several, or the file is missing or no whole GGUF file.
    """
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1 and not SHARD.search(files[0].name):
            names = ", ".join(file.name for file in files)
            raise UsageError(f"pretrain {str(path)!r} has several GGUF files: give the path of one of {names}")
        path = files[0] if files else path
    if path.suffix != ".gguf" or path.is_dir():
        return None
    if not path.is_file():
        raise UsageError(f"pretrain {str(path)!r}: there is no such file")
    if SHARD.search(path.name):
        raise UsageError(
            f"pretrain {str(path)!r} is one of several parts: join them with llama.cpp's `llama-gguf-split --merge`"
        )
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UsageError(f"pretrain {str(path)!r} is no GGUF file: it does not begin with GGUF")
    return path


def converted(file: Path) -> Path:
    """Return the Hugging Face folder of the model in a GGUF file, and describe it on stderr, once a process.

    Raises:
        UsageError: the package gguf is missing, or transformers cannot read the model.
    """
    folder = user_cache("gguf") / _digest(file)
    if not folder.is_dir():
        _convert(file, folder)
    if folder not in _described and os.environ.get("RANK", "0") == "0":
        _described.add(folder)
        print(f"{file.name}: {(folder / NOTE).read_text(encoding='utf-8')}, in {folder}", file=sys.stderr)
    return folder


def _digest(file: Path) -> str:
    converter = importlib.metadata.version("transformers")  # without its import, which takes seconds
    digest = hashlib.sha256(f"{converter} {file.stat().st_size}".encode())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        digest.update(contents[:HEAD_BYTES])
        for start in _piece_starts(len(contents)):
            digest.update(contents[start : start + PIECE_BYTES])
    return digest.hexdigest()[:32]


def _piece_starts(size: int) -> Iterator[int]:
    step = max(PIECE_BYTES, (size - HEAD_BYTES) // NUM_PIECES)
    yield from range(HEAD_BYTES, size, step)


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
        with one_at_a_time(folder):
            if not folder.is_dir():
                with whole_folder(folder) as written:
                    _write(file, written)
    except Exception as error:  # a damaged file fails anywhere in two libraries
        raise UsageError(f"pretrain {str(file)!r} cannot be converted to {folder}: {one_line(error)}") from error


def _write(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype, note = _type_of(file)
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=dtype, **_whole_weights())
    model.hf_quantizer = None  # the weights are whole now, but transformers would refuse to save them
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    (folder / NOTE).write_text(note, encoding="utf-8")


def _type_of(file: Path) -> tuple[str, str]:
    """Return the type of the whole weights, and the conversion in words."""
    from gguf import GGUFReader

    types = {tensor.tensor_type.name for tensor in GGUFReader(str(file)).tensors}
    if quantised := sorted(types - set(PLAIN_TYPES)):
        return "bfloat16", f"weights de-quantised from {', '.join(quantised)} to bf16"
    plain = next(name for name in ("BF16", "F16", "F32") if name in types)
    return PLAIN_TYPES[plain], f"weights of type {plain} converted to a Hugging Face folder"


def _whole_weights() -> dict[str, object]:
    """Return the argument of `from_pretrained` without which newer versions of transformers may keep weights packed."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
