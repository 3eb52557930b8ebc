"""Shapes of models in folders, from config.json and the headers of safetensors files.

This avoids the seconds that importing transformers and torch takes. Only headers are read, not weights.
"""

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from rlhf_cli.models.vision.families.table import FAMILIES, TEXT_ONLY
from rlhf_cli.planning.plain_shapes import Values, renamed_rope
from rlhf_cli.planning.shapes import NUM_EXPERTS, ModelShape, Weights, is_part, shape_from, vision_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Sizes = tuple[int, ...]
_NEEDED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"),
    "max_position_embeddings",
)
_DENSE = ("intermediate_size",)
_LARGE_HEADS = (*_DENSE, "head_dim")
_ACTIVE = ("num_experts_per_tok", "moe_intermediate_size")
_SHARED = (*_ACTIVE, "shared_expert_intermediate_size")
_ROUTED = (*_ACTIVE, "n_shared_experts")
_DELTA = ("layer_types", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3", "olmo2", "olmo3", "smollm3", "granite", "exaone4"), _DENSE),
    **dict.fromkeys(("qwen3", "gemma", "gemma3_text", "seed_oss", "glm4", "ministral3"), _LARGE_HEADS),
    "gemma2": (*_LARGE_HEADS, "attn_logit_softcapping"),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), _DENSE),
    "qwen3_vl_text": _LARGE_HEADS,
    "qwen2_moe": _SHARED,
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), _ACTIVE),
    "mixtral": (*_DENSE, "num_experts_per_tok"),
    **dict.fromkeys(("gpt_oss", "minimax_m2"), (*_LARGE_HEADS, "num_experts_per_tok")),
    "olmoe": (*_DENSE, "num_experts_per_tok"),
    "glm4_moe": _ROUTED,
    "deepseek_v3": ("head_dim", *_ROUTED, "kv_lora_rank", "qk_rope_head_dim"),
    "lfm2": (*_DENSE, "layer_types", "block_auto_adjust_ff_dim"),
    "lfm2_moe": ("layer_types", *_ACTIVE),
    "olmo_hybrid": (*_DENSE, *_DELTA),
    "qwen3_5_text": (*_LARGE_HEADS, *_DELTA),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), ("head_dim", *_DELTA, *_SHARED)),
}
"""Types of language models, with settings that have a default in transformers, so that a file must contain them."""
_OLDER = ("qwen2_vl", "qwen2_5_vl")
"""Types whose older files have the settings of the language model at the top level."""
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)\.weight")
"""Files have a matrix per expert. In memory, those of all experts are one parameter, with gates and inputs joined."""
_NOT_LINEAR = ("gate", "router", "embed_tokens", "pos_embed", "position_embedding", "lm_head", "score")
"""Names of modules with a matrix that are no linear layers of the decoder: routers, embeddings and heads."""
_BUFFERS = ("e_score_correction_bias", "expert_bias")
"""Tensors in files that are no parameters."""


def stored_shape(folder: Path, values: Values) -> ModelShape | None:
    """Return the shape of a model in a folder.

    Args:
        folder: model folder with safetensors files.
        values: contents of its config.json.

    Returns:
        None if the type is unknown, settings are missing, or the folder has no readable safetensors files.
    """
    config = _Config(_modern(values))
    try:
        stored = dict(_stored_tensors(folder)) if _is_known(config, values) else {}
    except (OSError, ValueError, KeyError, struct.error):
        # A damaged file is reported when transformers reads it.
        return None
    architecture = cast("PretrainedConfig", config)
    return shape_from(architecture, _weights(config, stored)) if _embedding(stored) else None


def _modern(values: Values) -> Values:
    """Return the contents of a config.json in the form that transformers writes today."""
    kind = values.get("model_type")
    if kind not in _OLDER or "text_config" in values or not isinstance(values.get("vision_config"), dict):
        return values
    vision = values["vision_config"] | {"model_type": f"{kind}_vision"}
    text = {name: value for name, value in values.items() if name != "vision_config"} | {"model_type": f"{kind}_text"}
    return values | {"text_config": text, "vision_config": vision}


class _Config(SimpleNamespace):
    """Contents of a config.json with the interface of a transformers configuration."""

    def __init__(self, values: Values) -> None:
        parts = {name: _Config(values[name]) for name in ("text_config", "vision_config") if _has_part(values, name)}
        # Older files have `rope_scaling`, which transformers replaces when it reads them.
        rope = values.get("rope_parameters") or renamed_rope(values.get("rope_scaling") or {})
        super().__init__(**{"model_type": ""} | values | parts | {"rope_parameters": rope})
        self._values = values

    def get_text_config(self) -> "_Config":
        return cast("_Config", getattr(self, "text_config", self))

    def to_dict(self) -> Values:
        return self._values


def _has_part(values: Values, name: str) -> bool:
    return isinstance(values.get(name), dict)


def _is_known(config: _Config, values: Values) -> bool:
    """Return whether config.json determines the shape together with the weights."""
    text = config.get_text_config()
    needed = _TYPES.get(text.model_type)
    if (
        needed is None
        or values.get("quantization_config")
        or values.get("auto_map")
        or "per_layer_config" in text.to_dict()
    ):
        return False
    given = text.to_dict().keys()
    has_experts = "num_experts_per_tok" not in needed or not given.isdisjoint(NUM_EXPERTS)
    return has_experts and given >= {*_NEEDED, *needed} and (text is config or _has_known_vision(config))


def _has_known_vision(config: _Config) -> bool:
    if config.model_type not in FAMILIES:
        return config.model_type in TEXT_ONLY
    vision = vars(getattr(config, "vision_config", _Config({})))
    has_hidden = "embed_dim" in vision or ("hidden_size" in vision and config.model_type != "qwen2_vl")
    has_width = "intermediate_size" in vision or "mlp_ratio" in vision
    return (
        bool(vision["model_type"]) and has_hidden and has_width and bool({"depth", "num_hidden_layers"} & vision.keys())
    )


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Sizes]]:
    """Yield names and sizes of all tensors in a folder.

    Raises:
        OSError, ValueError, KeyError, struct.error: a file is missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        with (folder / name).open("rb") as file:
            # Eight bytes with the length of the JSON header (the format's specification).
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _MAX_HEADER)))
        yield from ((key, tuple(entry["shape"])) for key, entry in header.items() if key != "__metadata__")


_MAX_HEADER = 100_000_000
"""Bytes of the longest header that the format allows."""


def _embedding(stored: Mapping[str, Sizes]) -> int:
    return sum(prod(sizes) for name, sizes in stored.items() if name.endswith("embed_tokens.weight"))


def _weights(config: _Config, stored: Mapping[str, Sizes]) -> Weights:
    """Return the parameters in memory for the tensors of a folder."""
    text, embedding = config.get_text_config(), _embedding(stored)
    is_tied = bool(getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)))
    sizes: Counter[str] = Counter()
    for name, shape in stored.items():
        if not name.endswith((*_BUFFERS, "lm_head.weight", "score.weight")):
            sizes[_name_in_memory(name)] += prod(shape)
    if not is_tied:
        # A reward model has no LM head in its files.
        sizes["lm_head.weight"] = embedding
    return Weights(
        sizes, embedding, embedding, is_tied, _linears(stored, vision_parts(cast("PretrainedConfig", config)))
    )


def _name_in_memory(name: str) -> str:
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return name
    return f"{expert[1]}.{'down_proj' if expert[2] in ('down_proj', 'w2') else 'gate_up_proj'}"


def _linears(stored: Mapping[str, Sizes], vision: tuple[str, ...]) -> tuple[tuple[str, int, int, int], ...]:
    found: Counter[tuple[str, int, int]] = Counter()
    for name, shape in stored.items():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        is_linear = module != name and len(shape) == 2 and not _EXPERT.fullmatch(name)
        if is_linear and last not in _NOT_LINEAR and not is_part(module, vision):
            found[last, shape[1], shape[0]] += 1
    return tuple((*layer, count) for layer, count in found.items())
