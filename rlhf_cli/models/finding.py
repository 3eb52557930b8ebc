"""Models by a folder, a run of this program or a name on the Hub; no weights are read.

Imports no transformers at module level, so that a wrong path is named at once.
"""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from rlhf_cli.config.model import ModelSource
from rlhf_cli.errors import UsageError, one_line
from rlhf_cli.models.gguf import converted, find_gguf

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
ADAPTER_FILE = "adapter_config.json"
SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
"""Files of a model that are read before anything heavy is imported, to name a broken one at once."""


def resolve_model_path(pretrain: str) -> str:
    """Return the folder with a model, or a Hub name.

    A run directory of this program stands for the model it trained, a GGUF file for the folder it is converted to.
    UsageError for a path that is no model, naming the missing file.
    """
    path = Path(pretrain).expanduser()
    if path.is_dir():
        return str(_model_folder(_snapshot(path) or path))
    if (gguf := find_gguf(path)) is not None:
        return str(converted(gguf))
    if path.exists():
        raise UsageError(
            f"pretrain {pretrain!r} is a file: give the folder of a model, a file that ends in .gguf, or a Hub name"
        )
    if pretrain.startswith((".", "/", "~")) or pretrain.endswith("/") or pretrain.count("/") > 1:
        raise UsageError(f"pretrain {pretrain!r}: there is no such folder")
    if not _is_in_hub_cache(pretrain) and not _hub_has_an_address():
        raise UsageError(f"pretrain {pretrain!r}: there is no such folder here, and no connection to the Hub")
    return pretrain


def _is_in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    return False


def _hub_has_an_address() -> bool:
    """Return whether it is worth asking the Hub: without a network its client tries again for a minute before it
    reports that.
    """
    from huggingface_hub.constants import ENDPOINT

    host = urlsplit(ENDPOINT).hostname
    if getproxies():
        return True
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(host, None))
    return False


def adapter_folder(pretrain: str) -> Path | None:
    """Return the folder of the adapter that this path stands for, itself or as the result of a run; None for other
    things.
    """
    path = Path(pretrain).expanduser()
    return next((folder for folder in (path, path / "model") if (folder / ADAPTER_FILE).is_file()), None)


def _snapshot(repository: Path) -> Path | None:
    """Return the files of `main` if this is a repository's folder in the Hub's cache, models--owner--name."""
    main = repository / "refs" / "main"
    snapshot = repository / "snapshots" / main.read_text().strip() if main.is_file() else None
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def _model_folder(path: Path) -> Path:
    if adapter_folder(str(path)) is not None:
        raise UsageError(f"{str(path)!r} is an adapter, not a whole model: `rlhf merge` folds it into its base")
    if not _has_weights(path) and (gguf := find_gguf(path)) is not None:
        return converted(gguf)
    if not (path / "config.json").is_file():
        if (path / "model" / "config.json").is_file():
            path = path / "model"
        elif (path / "config.yaml").is_file():
            raise UsageError(
                f"pretrain {str(path)!r} is a run directory without a finished model/: finish that run first"
            )
        else:
            raise UsageError(f"pretrain {str(path)!r} is no model: it has no config.json")
    if not _has_weights(path):
        raise UsageError(f"pretrain {str(path)!r} has a config.json but no weights (model.safetensors)")
    for name in SETTINGS_FILES:
        _require_json(path / name)
    return path


def _require_json(file: Path) -> None:
    """Raise UsageError for a file that is there and is no JSON object, as a broken download leaves it."""
    if not file.is_file():
        return
    try:
        read = json.loads(file.read_text())
    except ValueError as error:  # also for bytes that are no UTF-8
        raise UsageError(f"{file} is no JSON ({one_line(error)}): copy or download the model again") from error
    if not isinstance(read, dict):
        raise UsageError(f"{file} is no JSON object: copy or download the model again")


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES)


@contextlib.contextmanager
def naming_the_model(path: str, what: str) -> Iterator[None]:
    """Turn transformers' errors about files and names into one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = one_line(error)
        if "trust_remote_code" in reason:
            reason = "the model brings Python code of its own; read that code, then give --trust_remote_code"
        elif not Path(path).is_dir():
            reason = f"not a local folder, and the Hub gave none ({reason})"
        raise UsageError(f"pretrain {path!r}: {what} cannot be loaded: {reason}") from error


@dataclass(frozen=True)
class FoundModel:
    """A model before its weights are loaded: its folder or Hub name, and its Hugging Face configuration."""

    path: str
    architecture: "PretrainedConfig"

    def fingerprint(self) -> str:
        """Return a hash of the weights: it detects a folder that a later run has overwritten."""
        from rlhf_cli.models.weight_files import fingerprint, folder_of

        return fingerprint(folder_of(self.path))


def find_model(source: ModelSource) -> FoundModel:
    """Return the model of the settings.

    Raises:
        UsageError: `pretrain` is no model, or its configuration cannot be read.
    """
    path = resolve_model_path(source.pretrain)
    from transformers import AutoConfig

    with naming_the_model(path, "the configuration"):
        return FoundModel(path, AutoConfig.from_pretrained(path, trust_remote_code=source.trust_remote_code))
