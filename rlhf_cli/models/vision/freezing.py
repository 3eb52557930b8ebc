"""Frozen parts of vision-language models.

Checkpoints omit them and name the model that contains them.
"""

import json
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import resolve_model_path
from rlhf_cli.models.vision.families.table import FAMILIES, is_text_only, takes_pictures
from rlhf_cli.models.weight_files import fingerprint, folder_of

_SETTINGS = ("freeze_vision_tower", "freeze_projector")
_ORIGIN_FILE = "frozen_parts.json"
"""File stored with a run's weights that names the model with the frozen parts."""
_ORIGIN = "frozen_origin"
"""Attribute of a loaded model with frozen parts: the contents of this file."""


def check_trained_parts(
    config: ModelConfig, adapter: LoraConfig, architecture: PretrainedConfig, *, is_adapted: bool
) -> None:
    """Raise UsageError if the settings freeze or adapt a part the model lacks, or freeze parts under an adapter."""
    frozen = next((name for name in _SETTINGS if getattr(config, name)), None)
    given = frozen or ("lora_vision_tower" if adapter.lora_vision_tower else None)
    if given and not takes_pictures(architecture):
        raise UsageError(f"{given}: models of type {architecture.model_type} have no trainable vision encoder")
    if frozen and is_adapted:
        raise UsageError(f"{frozen}: with an adapter, all model weights are frozen already; drop it")


def freeze_parts(model: PreTrainedModel, config: ModelConfig) -> None:
    """Freeze the configured parts, or all but the language model for types that train on text only.

    Text models, such as other roles, have none.
    """
    frozen = _parts_to_freeze(model, config)
    if not frozen:
        return
    for parameter in frozen:
        parameter.requires_grad_(False)
    # Hash now, not at the first checkpoint: the folder may be overwritten during training.
    setattr(model, _ORIGIN, _origin(config))


def _parts_to_freeze(model: PreTrainedModel, config: ModelConfig) -> list[nn.Parameter]:
    if is_text_only(model.config):
        heads = (model.get_output_embeddings(), getattr(model, "score", None))
        trained = {p for part in (model.get_decoder(), *heads) if part is not None for p in part.parameters()}
        return [parameter for parameter in model.parameters() if parameter not in trained]
    if not any(getattr(config, name) for name in _SETTINGS) or not takes_pictures(model.config):
        return []
    tower, projectors = tower_parameters(model)
    return [*(tower if config.freeze_vision_tower else []), *(projectors if config.freeze_projector else [])]


def _origin(config: ModelConfig) -> dict[str, str]:
    path = resolve_model_path(config.pretrain)
    mark = fingerprint(folder_of(path))
    # Absolute, because checkpoints are read from other working directories.
    return {"model": str(Path(path).resolve()) if Path(path).is_dir() else path, "fingerprint": mark}


def describe_frozen_parts(model: nn.Module, folder: Path) -> None:
    """Write the name of the model that contains the frozen parts, if there are any."""
    if (origin := getattr(model, _ORIGIN, None)) is not None:
        (folder / _ORIGIN_FILE).write_text(json.dumps(origin) + "\n")


def origin_of(folder: Path, *, moved_to: str | None) -> Path | None:
    """Return the folder of the model that contains a run's frozen parts, or None if nothing was frozen.

    Args:
        folder: the folder that `describe_frozen_parts` wrote to.
        moved_to: current model path, if it has moved since training.

    Raises:
        UsageError: the model cannot be found, or its weights have changed.
    """
    if not (folder / _ORIGIN_FILE).is_file():
        return None
    written = json.loads((folder / _ORIGIN_FILE).read_text())
    try:
        origin = folder_of(resolve_model_path(moved_to or written["model"]))
    except UsageError as error:
        raise UsageError(f"{folder}: cannot find the model with the frozen parts: {error}") from error
    if (mark := fingerprint(origin)) != written["fingerprint"]:
        raise UsageError(
            f"{folder}: the frozen parts come from a different model: the weights at {origin} have fingerprint {mark}, "
            f"not {written['fingerprint']}"
        )
    return origin


def tower_parameters(model: PreTrainedModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return encoder and projector parameters. Projectors within the encoder count only as projectors."""
    parts = FAMILIES[model.config.model_type]
    projectors = [p for name in parts.projectors for p in model.get_submodule(name).parameters()]
    of_projectors = set(projectors)
    tower = model.get_submodule(parts.tower).parameters()
    return [parameter for parameter in tower if parameter not in of_projectors], projectors


def frozen_parts_identity(config: ModelConfig) -> dict[str, object]:
    """Return the settings that must match for a checkpoint to be resumed."""
    return {name: getattr(config, name) for name in _SETTINGS}
