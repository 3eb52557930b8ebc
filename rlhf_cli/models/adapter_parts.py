"""Parts of other tools' adapters that are refused, because neither training nor merging would compute them right."""

import json
from pathlib import Path
from typing import Any

from rlhf_cli.errors import UsageError

CHANGED_NAMES = {
    "layer_replication": "layers of the model twice",
    "target_parameters": "factors on whole parameters, as of experts",
    "trainable_token_indices": "single rows of the embedding",
    "alora_invocation_tokens": "tokens from which on it counts",
    "use_qalora": "pooled inputs",
    "use_bdlora": "factors of blocks",
    "velora_config": "compressed activations",
    "monteclora_config": "sampled factors",
    "arrow_config": "a router over adapters",
    "kasa_config": "singular values",
    "lora_bias": "biases of its own",
}
"""Settings of PEFT by which an adapter is more than two factors and a magnitude, with that part in words."""
HARMLESS_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` that leave the model under the adapter as it is."""


def require_known_parts(folder: Path, config: Any) -> None:
    """Raise UsageError unless PEFT's configuration is of an adapter made of factors, magnitudes and whole layers."""
    for name, part in CHANGED_NAMES.items():
        if getattr(config, name, None):
            raise UsageError(f"adapter {folder} has {part} ({name}), which this program does not know")
    if config.bias != "none":
        raise UsageError(f"adapter {folder} trains biases of the model (bias {config.bias}), which are not known here")
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower() not in HARMLESS_STARTS:
        raise UsageError(
            f"adapter {folder} belongs to a model that was changed when its training began (init_lora_weights "
            f"{start}): save it with PEFT's path_initial_model_for_weight_conversion"
        )


def require_whole_precision(folder: Path, base: Path) -> None:
    """Raise UsageError if the weights of the model under an adapter are quantised on disk, as Unsloth's are."""
    file = base / "config.json"
    quantised = json.loads(file.read_text()).get("quantization_config") if file.is_file() else None
    if quantised:
        raise UsageError(
            f"adapter {folder}: the model under it, {base}, is quantised ({quantised.get('quant_method')}): "
            "`rlhf merge --base` with its 16-bit original makes a model that can be used here"
        )
