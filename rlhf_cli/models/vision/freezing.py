"""Parts of a vision-language model that training leaves as they are."""

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.families.table import FAMILIES, takes_pictures

SETTINGS = ("freeze_vision_tower", "freeze_projector")


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
