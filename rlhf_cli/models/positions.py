"""Number of positions of a model, from its configuration."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WITHIN_POSITIONS = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
"""RoPE scaling types where the configured number of positions already includes the scaling, as in vLLM."""


def known_positions(architecture: "PretrainedConfig") -> tuple[int, str] | None:
    """Return the model's maximum positions and their config.json key, or None.

    None if the configuration has no limit, or if vLLM is set to ignore it.
    """
    text = architecture.get_text_config()
    key = "model_max_length" if getattr(text, "model_max_length", None) else "max_position_embeddings"
    positions = getattr(text, key, None)
    is_unlimited = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")
    return None if positions is None or is_unlimited else (int(positions * _stretch(text)), key)


def _stretch(text: Any) -> float:
    """Return the factor by which vLLM multiplies the configured positions for scaled RoPE."""
    rope = getattr(text, "rope_parameters", None) or {}
    # rope_parameters is a single dict, or one dict per layer type.
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    # vLLM exempts Gemma 3 as well: its max_position_embeddings includes the scaling.
    if "gemma3" in text.model_type:
        return 1.0
    scaled = [kind for kind in kinds if kind.get("rope_type") not in _WITHIN_POSITIONS]
    return max((kind.get("factor") or 1.0 for kind in scaled), default=1.0)
