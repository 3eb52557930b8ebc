"""Which linear layers of a vision-language model get an adapter."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.families.table import names_of_parts

EVERYWHERE = "all-linear"


def language_targets(model: PreTrainedModel, wanted: str | Sequence[str]) -> list[str]:
    """Return the whole names of the linear layers of the language part that the setting names, but not the head.

    Raises:
        UsageError: it has no such layer.
    """
    others = names_of_parts(model.config)
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
        if not any(name == other or name.startswith(f"{other}.") for other in others)
        if wanted == EVERYWHERE or any(f".{name}".endswith(f".{one}") for one in wanted)
    ]
    if not names:
        raise UsageError(
            f"target_modules: the language part has no linear layer {', '.join(wanted)}; --lora_vision_tower also "
            "looks in the vision tower"
        )
    return names
