"""Select the linear layers in a vision-language model that get an adapter."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.families.table import names_of_parts

EVERYWHERE = "all-linear"


def language_targets(model: PreTrainedModel, wanted: str | Sequence[str]) -> list[str]:
    """Return the full names of matching linear layers in the language model, except the head.

    Raises:
        UsageError: there is no such layer.
    """
    vision_parts = names_of_parts(model.config)
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        # PEFT's "all-linear" also excludes the head.
        if isinstance(module, nn.Linear) and module is not head
        # Compare prefixes: the projector may be nested in the encoder.
        if not any(name == part or name.startswith(f"{part}.") for part in vision_parts)
        if wanted == EVERYWHERE or any(f".{name}".endswith(f".{one}") for one in wanted)
    ]
    if not names:
        raise UsageError(
            f"target_modules: the language model has no linear layer {', '.join(wanted)}; --lora_vision_tower also "
            "searches the vision encoder"
        )
    return names
