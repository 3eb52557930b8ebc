"""Configurations of models for a plan: local folders without weights, the Hub's cache, or a table of published models."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli.config.model import ModelSource
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import ADAPTER_FILE, adapter_folder, find_model, naming_the_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PUBLISHED = Path(__file__).with_name("published.json")


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the configurations of well-known models by Hub name. They contain only shapes."""
    rows = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    return {name: row["config"] for row in rows for name in row["names"]}


def find_architecture(pretrain: str, *, trust_remote_code: bool = False) -> "PretrainedConfig":
    """Return a model's configuration. A folder needs only its config.json; an adapter has its base's configuration.

    Raises:
        UsageError: there is no such model here, and it is not in the table of published models.
    """
    folder = adapter_folder(pretrain)
    if folder is not None:
        return find_architecture(_base_of(folder), trust_remote_code=trust_remote_code)
    from transformers import AutoConfig

    path = Path(pretrain).expanduser()
    place = next((place for place in (path, path / "model") if (place / "config.json").is_file()), None)
    if place is not None:
        with naming_the_model(str(place), "the configuration"):
            return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    if (known := published().get(pretrain)) is not None:
        values = dict(known)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    try:
        return find_model(ModelSource(pretrain=pretrain, trust_remote_code=trust_remote_code)).architecture
    except UsageError as error:
        raise UsageError(
            f"{error}; a plan needs only a folder with the model's config.json, or the name of one of "
            f"{len(published())} published models, such as Qwen/Qwen2.5-7B"
        ) from error


def _base_of(folder: Path) -> str:
    """Return the base model that an adapter names."""
    try:
        return str(json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError) as error:
        raise UsageError(f"{folder / ADAPTER_FILE} names no base model: copy or download the adapter again") from error
