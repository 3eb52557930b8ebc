"""Shapes of models for a plan: from a table of published models, a folder, or a configuration."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli.config.model import ModelSource
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import ADAPTER_FILE, adapter_folder, find_model, naming_the_model
from rlhf_cli.planning.plain_shapes import Values, plain_shape
from rlhf_cli.planning.shapes import ModelShape, shape_of
from rlhf_cli.planning.stored_shapes import stored_shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PUBLISHED = Path(__file__).with_name("published.json")


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return rows of well-known models by Hub name.

    A row has the sizes in the model's `config`, and the `shape` that `shape_of` computes from them.
    """
    rows = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    return {name: row for row in rows for name in row["names"]}


def find_shape(pretrain: str, *, trust_remote_code: bool = False) -> ModelShape:
    """Return a model's shape. A folder needs only its config.json; an adapter has the shape of its base.

    Raises:
        UsageError: there is no such model here, and it is not in the table of published models.
    """
    pretrain = base_of(pretrain)
    row = published().get(pretrain)
    if row is not None and not Path(pretrain).exists():
        # Without importing transformers, which takes seconds.
        values = row["shape"] | {"linears": tuple(map(tuple, row["shape"]["linears"]))}
        return ModelShape(**values)
    shape = _folder_shape(pretrain)
    if shape is not None:
        return shape
    architecture = find_architecture(pretrain, trust_remote_code=trust_remote_code)
    return shape_of(architecture, trust_remote_code=trust_remote_code)


def base_of(pretrain: str) -> str:
    """Return the base model of an adapter, or the model itself."""
    folder = adapter_folder(pretrain)
    return pretrain if folder is None else base_of(str(read_adapter(folder, "base_model_name_or_path")))


def _folder_shape(pretrain: str) -> ModelShape | None:
    """Return the shape of a model in a folder, or None if only transformers can tell."""
    place = model_place(pretrain)
    if place is None:
        return None
    config = read_config(place)
    return plain_shape(config) or stored_shape(place, config)


def read_config(place: Path) -> Values:
    """Return the contents of a folder's config.json; empty if it is damaged, which transformers reports."""
    try:
        found = json.loads((place / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def model_place(pretrain: str) -> Path | None:
    """Return the folder with a model's config.json: the folder itself, or model/ in a run."""
    path = Path(pretrain).expanduser()
    return next((place for place in (path, path / "model") if (place / "config.json").is_file()), None)


def find_architecture(pretrain: str, *, trust_remote_code: bool) -> "PretrainedConfig":
    """Return the configuration of a model. Raises UsageError if there is none here."""
    from transformers import AutoConfig

    if (place := model_place(pretrain)) is not None:
        with naming_the_model(str(place), "the configuration"):
            return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    if (row := published().get(pretrain)) is not None:
        return config_of(row)
    try:
        return find_model(ModelSource(pretrain=pretrain, trust_remote_code=trust_remote_code)).architecture
    except UsageError as error:
        raise UsageError(
            f"{error}; a plan needs only a folder with the model's config.json, or the name of one of "
            f"{len(published())} published models, such as Qwen/Qwen2.5-7B"
        ) from error


def config_of(row: dict[str, Any]) -> "PretrainedConfig":
    """Return the configuration of a published model."""
    from transformers import AutoConfig

    values = dict(row["config"])
    return AutoConfig.for_model(values.pop("model_type"), **values)


def read_adapter(folder: Path, key: str) -> Any:
    """Return a value of an adapter's configuration. Raises UsageError if the file is damaged."""
    try:
        return json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError) as error:
        raise UsageError(f"{folder / ADAPTER_FILE} has no {key}: copy or download the adapter again") from error
