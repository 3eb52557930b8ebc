"""Reject adapter features from other tools that training or merging would compute incorrectly."""

import json
from pathlib import Path
from typing import Any

from rlhf_cli.errors import UsageError

_CHANGED_NAMES = {
    "layer_replication": "replicated layers",
    "target_parameters": "factors on full parameters, such as experts",
    "trainable_token_indices": "trainable embedding rows",
    "alora_invocation_tokens": "invocation tokens",
    "use_qalora": "pooled inputs",
    "use_bdlora": "block-diagonal factors",
    "velora_config": "compressed activations",
    "monteclora_config": "sampled factors",
    "arrow_config": "a router over adapters",
    "kasa_config": "singular values",
    "lora_bias": "LoRA biases",
}
"""PEFT settings for features beyond two factors and a magnitude, with a description."""
_HARMLESS_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` that do not change the base model."""


def require_known_parts(folder: Path, config: Any) -> None:
    """Raise UsageError unless the adapter consists of factors, magnitudes and fully trained layers."""
    for name, part in _CHANGED_NAMES.items():
        if getattr(config, name, None):
            raise UsageError(f"adapter {folder} uses {part} ({name}), which is not supported")
    # PEFT's bias setting changes biases of the base model, which merging and weight sync would miss.
    if config.bias != "none":
        raise UsageError(f"adapter {folder} trains model biases (bias {config.bias}), which is not supported")
    # PiSSA, OLoRA and similar subtract the initial adapter from the base, so the stored base does not match.
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower() not in _HARMLESS_STARTS:
        raise UsageError(
            f"adapter {folder} modified its base model at initialization (init_lora_weights {start}): save it with "
            "PEFT's path_initial_model_for_weight_conversion"
        )


def require_whole_precision(folder: Path, base: Path) -> None:
    """Raise UsageError if an adapter's base model is stored quantized, as Unsloth's are."""
    file = base / "config.json"
    quantized = json.loads(file.read_text()).get("quantization_config") if file.is_file() else None
    if quantized:
        raise UsageError(
            f"adapter {folder}: its base model {base} is quantized ({quantized.get('quant_method')}): merge it into "
            "the 16-bit original with `rlhf merge --base` first"
        )
