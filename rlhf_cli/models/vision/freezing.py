"""Parts of a vision-language model that training leaves as they are.

Checkpoints leave them out too, and name the model that has them.
"""

import json
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import resolve_model_path
from rlhf_cli.models.vision.families.table import FAMILIES, takes_pictures
from rlhf_cli.models.weight_files import fingerprint, folder_of

SETTINGS = ("freeze_vision_tower", "freeze_projector")
ORIGIN_FILE = "frozen_parts.json"
"""Names the model that a run with frozen parts began with, beside the run's own weights."""
ORIGIN = "frozen_origin"
"""Attribute of a loaded model with frozen parts that holds the contents of this file."""


def check_trained_parts(
    config: ModelConfig, adapter: LoraConfig, architecture: PretrainedConfig, *, is_adapted: bool
) -> None:
    """Raise UsageError if the settings name a part that the model lacks, or freeze what an adapter leaves as it is."""
    frozen = next((name for name in SETTINGS if getattr(config, name)), None)
    given = frozen or ("lora_vision_tower" if adapter.lora_vision_tower else None)
    if given and not takes_pictures(architecture):
        raise UsageError(f"{given}: a model of type {architecture.model_type} has no vision tower that is trained here")
    if frozen and is_adapted:
        raise UsageError(f"{frozen}: an adapter leaves all weights of the model as they are; drop it")


def freeze_parts(model: PreTrainedModel, config: ModelConfig) -> None:
    """Take the parts of the settings out of training; a text model, as of another role, has none."""
    if not any(getattr(config, name) for name in SETTINGS) or not takes_pictures(model.config):
        return
    tower, projectors = tower_parameters(model)
    for parameter in [*(tower if config.freeze_vision_tower else []), *(projectors if config.freeze_projector else [])]:
        parameter.requires_grad_(False)
    setattr(model, ORIGIN, _origin(config))


def _origin(config: ModelConfig) -> dict[str, str]:
    path = resolve_model_path(config.pretrain)
    mark = fingerprint(folder_of(path))
    return {"model": str(Path(path).resolve()) if Path(path).is_dir() else path, "fingerprint": mark}


def describe_frozen_parts(model: nn.Module, folder: Path) -> None:
    """Write which model has the weights of the parts that training leaves as they are, if there are any."""
    if (origin := getattr(model, ORIGIN, None)) is not None:
        (folder / ORIGIN_FILE).write_text(json.dumps(origin) + "\n")


def origin_of(folder: Path, *, moved_to: str | None) -> Path | None:
    """Return the folder of the model that has the frozen parts of a run, None if nothing of it was frozen.

    Args:
        folder: what `describe_frozen_parts` wrote to.
        moved_to: the present place of the model, if it is another one than in training.

    Raises:
        UsageError: the model is gone, or its weights are others now.
    """
    if not (folder / ORIGIN_FILE).is_file():
        return None
    written = json.loads((folder / ORIGIN_FILE).read_text())
    try:
        origin = folder_of(resolve_model_path(moved_to or written["model"]))
    except UsageError as error:
        raise UsageError(f"{folder}: the model with the frozen parts cannot be found: {error}") from error
    if (mark := fingerprint(origin)) != written["fingerprint"]:
        raise UsageError(
            f"{folder}: the frozen parts are of another model: the weights at {origin} have fingerprint {mark}, not "
            f"{written['fingerprint']}"
        )
    return origin


def tower_parameters(model: PreTrainedModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of the tower and of the projectors; a projector within the tower is none of its parts."""
    parts = FAMILIES[model.config.model_type]
    projectors = [p for name in parts.projectors for p in model.get_submodule(name).parameters()]
    of_projectors = set(projectors)
    tower = model.get_submodule(parts.tower).parameters()
    return [parameter for parameter in tower if parameter not in of_projectors], projectors


def frozen_parts_identity(config: ModelConfig) -> dict[str, object]:
    """Return the settings that have to be equal for a checkpoint to be continued."""
    return {name: getattr(config, name) for name in SETTINGS}
