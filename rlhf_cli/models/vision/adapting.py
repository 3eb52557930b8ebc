"""Select the linear layers in a vision-language model that get an adapter."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.errors import UsageError

EVERYWHERE = "all-linear"


def language_targets(model: PreTrainedModel, wanted: str | Sequence[str]) -> list[str]:
    """Return the full names of matching linear layers in the decoder.

    Raises:
        UsageError: there is no such layer.
    """
    in_decoder = set(model.get_decoder().modules())
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module in in_decoder
        if wanted == EVERYWHERE or any(f".{name}".endswith(f".{one}") for one in wanted)
    ]
    if not names:
        raise UsageError(
            f"target_modules: the language model has no linear layer {', '.join(wanted)}; --lora_vision_tower also "
            "searches the vision encoder"
        )
    return names
