"""Locate models by folder, run directory or Hub name, without reading weights.

Does not import transformers at module level, so that an invalid path is reported immediately.
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

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
ADAPTER_FILE = "adapter_config.json"
_SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
"""Model files to validate before heavy imports, so that a broken one is reported immediately."""


def resolve_model_path(pretrain: str) -> str:
    """Return the model folder, or a Hub name.

    A run directory resolves to the model it trained, a GGUF file to its converted folder. Raises UsageError for a path
    that is not a model, and names the missing file.
    """
    path = Path(pretrain).expanduser()
    if path.is_dir():
        return str(_model_folder(_snapshot(path) or path))
    if (gguf := find_gguf(path)) is not None:
        return str(converted(gguf))
    if path.exists():
        raise UsageError(f"pretrain {pretrain!r} is a file: use a model folder, a .gguf file or a Hub name")
    # Hub names have at most one slash; anything else must be a local path.
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
    """Return whether the Hub is reachable in principle: without a network, its client retries for a minute."""
    from huggingface_hub.constants import ENDPOINT

    host = urlsplit(ENDPOINT).hostname
    # Behind a proxy, the proxy resolves names.
    if getproxies():
        return True
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(host, None))
    return False


def adapter_folder(pretrain: str) -> Path | None:
    """Return the adapter folder for a path (the folder itself or a run's model), or None."""
    path = Path(pretrain).expanduser()
    return next((folder for folder in (path, path / "model") if (folder / ADAPTER_FILE).is_file()), None)


def _snapshot(repository: Path) -> Path | None:
    """Return the `main` snapshot if this is a Hub cache repository (models--owner--name)."""
    main = repository / "refs" / "main"
    snapshot = repository / "snapshots" / main.read_text().strip() if main.is_file() else None
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def _model_folder(path: Path) -> Path:
    # First, because the checks below would report a missing config.json for an adapter.
    if adapter_folder(str(path)) is not None:
        raise UsageError(f"{str(path)!r} is an adapter, not a full model: merge it into its base with `rlhf merge`")
    # Folders with both formats use safetensors, which need no conversion.
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
            raise UsageError(f"pretrain {str(path)!r} is not a model: it has no config.json")
    if not _has_weights(path):
        raise UsageError(f"pretrain {str(path)!r} has a config.json but no weights (model.safetensors)")
    for name in _SETTINGS_FILES:
        _require_json(path / name)
    return path


def _require_json(file: Path) -> None:
    """Raise UsageError if an existing file is not a JSON object, for example after an interrupted download."""
    if not file.is_file():
        return
    try:
        read = json.loads(file.read_text())
    # ValueError includes UnicodeDecodeError.
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON ({one_line(error)}): copy or download the model again") from error
    if not isinstance(read, dict):
        raise UsageError(f"{file} is not a JSON object: copy or download the model again")


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES)


@contextlib.contextmanager
def naming_the_model(path: str, what: str) -> Iterator[None]:
    """Convert transformers errors about files and names into one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = one_line(error)
        if "trust_remote_code" in reason:
            reason = "the model contains Python code; review it, then set --trust_remote_code"
        elif not Path(path).is_dir():
            reason = f"not a local folder, and not available from the Hub ({reason})"
        raise UsageError(f"pretrain {path!r}: {what} cannot be loaded: {reason}") from error


@dataclass(frozen=True)
class FoundModel:
    """A model before loading weights: folder or Hub name, and Hugging Face configuration."""

    path: str
    architecture: "PretrainedConfig"

    def fingerprint(self) -> str:
        """Hash the weights. The hash changes if a later run overwrites the folder."""
        from rlhf_cli.models.weight_files import fingerprint, folder_of

        return fingerprint(folder_of(self.path))


def find_model(source: ModelSource) -> FoundModel:
    """Find the configured model.

    Raises:
        UsageError: `pretrain` is not a model, or its configuration cannot be read.
    """
    path = resolve_model_path(source.pretrain)
    # Import after resolving the path: transformers takes seconds.
    from transformers import AutoConfig

    with naming_the_model(path, "the configuration"):
        return FoundModel(path, AutoConfig.from_pretrained(path, trust_remote_code=source.trust_remote_code))
