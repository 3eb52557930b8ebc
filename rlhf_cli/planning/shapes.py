"""Sizes of a model that determine memory and time, from its configuration on PyTorch's meta device, without weights.

Values that layers keep were counted on fake CUDA tensors in bf16, with and without Liger's kernels
(docs/benchmarks.md). Values for recurrent layers are those of PyTorch code without their kernels.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_cli.models.cost import (
    active_width,
    attention_layers,
    head_size,
    key_value_width,
    layer_configs,
    num_recurrent_layers,
)
from rlhf_cli.models.fused import fused_kernels
from rlhf_cli.models.positions import known_positions
from rlhf_cli.models.vision.families.table import names_of_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEPT_OF_HIDDEN = 12
"""Hidden sizes that a recurrent layer keeps per token in addition to its state and MLP."""
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3")
"""Types with norms of queries and keys."""
_MORE_HIDDEN = {"phi3": 2, "olmo2": 4, "olmo3": 4, "gemma2": 12, "gemma3_text": 12}
"""More hidden sizes per layer, by type: for norms of the outputs of attention and MLP, or joint projections (phi3)."""


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a vision encoder without its projectors, which have one input per group of patches.

    - `parameters`: parameters that multiply a patch.
    - `kept_values`: activations per patch, without gradient checkpointing.

    Example: the encoder of Qwen2.5-VL has 32 layers of 1,280, so a patch keeps 32 * (15 * 1,280 + 4 * 3,420) values.
    """

    parameters: int
    layers: int
    hidden: int
    kept_values: int

    @property
    def recomputed_values(self) -> int:
        """Activations per patch with gradient checkpointing: all layer inputs, plus a layer."""
        return self.layers * self.hidden + self.kept_values // self.layers

    def forward_flops(self, patches: float, per_image: int) -> float:
        """Return the floating-point operations on patches, which attend to all of their image."""
        return patches * (2 * self.parameters + 4 * self.layers * self.hidden * per_image)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a language model.

    - `parameters`: all parameters, tied ones once. `largest` is the size of the largest one.
    - `active`: parameters that multiply a token: no input embedding, no vision encoder, only active experts.
    - `head`: parameters of the LM head, 0 without one. `has_tied_head`: whether it is the input embedding.
    - `query_width`: query heads times head size.
    - `cache_values`: KV cache values per token in all layers; `key_heads` limits its split over GPUs.
    - `kept_values`, `recomputed_values`: activations per token, without and with gradient checkpointing.
    - `layer_values`: activations per token of the largest layer.
    - `fused_savings`: activations per token that a layer does not keep with Liger's kernels.
    - `backward_values`, `fused_backward_values`: gradients per token in the backward pass of a layer, without and with
      Liger's kernels.
    - `positions`: tokens of the longest sequence, None without a limit.
    - `vision`: its vision encoder, None if images are not read.
    - `capped_heads`: query heads per layer whose scores have a softcap, which few kernels support.
    - `linears`: linear layers of the decoder except the head: name in its layer, inputs, outputs, and their number.

    Example: Qwen2.5-7B has 7,615,616,512 parameters and 28 * 2 * 4 * 128 = 28,672 cache values per token.
    """

    parameters: int
    active: int
    head: int
    has_tied_head: bool
    largest: int
    layers: int
    hidden: int
    vocabulary: int
    attention_layers: int
    query_width: int
    key_heads: int
    cache_values: int
    kept_values: int
    recomputed_values: int
    layer_values: int
    fused_savings: int
    backward_values: int
    fused_backward_values: int
    capped_heads: int
    positions: int | None
    vision: VisionShape | None = None
    linears: tuple[tuple[str, int, int, int], ...] = ()

    def with_score_head(self) -> "ModelShape":
        """Return the shape of a critic or reward model of this size: one output instead of the vocabulary."""
        own_head = 0 if self.has_tied_head else self.head
        return replace(
            self,
            parameters=self.parameters - own_head + self.hidden,
            active=self.active - self.head + self.hidden,
            head=0,
            vocabulary=1,
        )

    def adapter_parameters(self, rank: int, targets: Sequence[str], excluded: Sequence[str] = ()) -> int:
        """Return the parameters of a LoRA adapter: `rank` * (inputs + outputs) for each adapted layer."""
        return sum(
            count * rank * (inputs + outputs)
            for name, inputs, outputs, count in self.linears
            if ("all-linear" in targets or name in _last_names(targets)) and name not in excluded
        )

    def with_patches(self, patches: float, *, per_image: int, kept: float) -> "ModelShape":
        """Return the shape with the vision encoder's work added to each token.

        Args:
            patches: image patches per token, of images with `per_image` patches each.
            kept: patches per token whose activations wait for a backward pass.
        """
        assert self.vision is not None
        return replace(
            self,
            active=self.active + round(self.vision.forward_flops(patches, per_image) / 2),
            kept_values=self.kept_values + round(kept * self.vision.kept_values),
            recomputed_values=self.recomputed_values + round(kept * self.vision.recomputed_values),
        )

    def forward_flops(self, num_tokens: float, length: float) -> float:
        """Return the floating-point operations of a forward pass on tokens of sequences with this mean length."""
        # A causal query meets half of its sequence on average, in two products of two operations each.
        attention = 4 * self.attention_layers * self.query_width * length / 2
        return num_tokens * (2 * self.active + attention)


def _last_names(targets: Sequence[str]) -> set[str]:
    return {target.rpartition(".")[2] for target in targets}


@dataclass(frozen=True)
class Weights:
    """Parameters of a language model: sizes by name, tied ones once.

    - `embedding`, `head`: sizes of the input embedding and LM head, 0 without one. `has_tied_head`: they are the same.
    - `linears`: linear layers, as in `ModelShape`.
    """

    sizes: Mapping[str, int]
    embedding: int
    head: int
    has_tied_head: bool
    linears: tuple[tuple[str, int, int, int], ...]


def shape_of(config: "PretrainedConfig", *, trust_remote_code: bool = False) -> ModelShape:
    """Compute a language model's sizes, including any vision encoder, without allocating weights."""
    return shape_from(config, _meta_weights(config, trust_remote_code=trust_remote_code))


def shape_from(config: "PretrainedConfig", weights: Weights) -> ModelShape:
    """Return the sizes of a model with this configuration and these parameters."""
    text, vision = config.get_text_config(), vision_parts(config)
    decoder = {name: size for name, size in weights.sizes.items() if not is_part(name, vision)}
    inactive = _inactive_experts(decoder, text)
    attention = [layer for layer, holds in zip(layer_configs(text), attention_layers(text), strict=True) if holds]
    queries = [layer.num_attention_heads * head_size(layer) for layer in attention]
    return ModelShape(
        parameters=sum(weights.sizes.values()),
        active=int(sum(decoder.values()) - inactive - (0 if weights.has_tied_head else weights.embedding)),
        head=weights.head,
        has_tied_head=weights.has_tied_head,
        largest=max(weights.sizes.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        attention_layers=len(attention),
        # The mean, because layers may differ in head size.
        query_width=sum(queries) // max(1, len(queries)),
        key_heads=max((key_value_width(layer) // head_size(layer) for layer in attention), default=1),
        cache_values=sum(_cache_values(text, key_value_width(layer)) for layer in attention),
        kept_values=kept_values(config),
        recomputed_values=recomputed_values(config),
        layer_values=largest_layer(text),
        fused_savings=fused_savings(text),
        backward_values=backward_values(text),
        fused_backward_values=backward_values(text, is_fused=True),
        capped_heads=_capped_heads(text),
        positions=num_positions(config),
        vision=_vision_shape(config, weights.sizes, vision),
        linears=weights.linears,
    )


def vision_parts(config: "PretrainedConfig") -> tuple[str, ...]:
    """Return the module names of the vision encoder and its projectors, which older files store without `model.`."""
    return tuple(name.removeprefix("model.") for name in names_of_parts(config))


_VISION_VALUES = {"qwen2_5_vl_vision": (15, 4), "clip_vision_model": (8, 3), "qwen2_vl_vision": (11, 3)}
_PLAIN_VISION, _ROTATED_VISION = (8, 2), (11, 2)
"""Hidden and intermediate sizes that a layer of a vision encoder keeps per patch in bf16, by type; with position
embeddings, and with rotations. `test_planned_images.py` counts them on tensors that PyTorch saves."""


def _vision_shape(config: "PretrainedConfig", sizes: Mapping[str, int], parts: Sequence[str]) -> VisionShape | None:
    if not parts:
        return None
    tower, *projectors = parts
    vision = config.vision_config

    def size(*names: str) -> int:
        return int(next(getattr(vision, name) for name in names if getattr(vision, name, None)))

    # In Qwen2-VL, `hidden_size` is the size of the language model.
    hidden = size("embed_dim", "hidden_size")
    width = size("intermediate_size") if hasattr(vision, "intermediate_size") else hidden * size("mlp_ratio")
    usual = _PLAIN_VISION if hasattr(vision, "num_hidden_layers") else _ROTATED_VISION
    of_hidden, of_width = _VISION_VALUES.get(vision.model_type, usual)
    layers = size("depth", "num_hidden_layers")
    own = (count for name, count in sizes.items() if is_part(name, [tower]) and not is_part(name, projectors))
    return VisionShape(sum(own), layers, hidden, layers * (of_hidden * hidden + of_width * width))


def num_positions(config: "PretrainedConfig") -> int | None:
    """Return the tokens of the longest sequence, None without a limit."""
    known = known_positions(config)
    return None if known is None else known[0]


def _capped_heads(text: "PretrainedConfig") -> int:
    return text.num_attention_heads if getattr(text, "attn_logit_softcapping", None) else 0


def _meta_weights(config: "PretrainedConfig", *, trust_remote_code: bool) -> Weights:
    """Return the parameters of a model on PyTorch's meta device. Importing torch and transformers takes seconds."""
    import torch

    from rlhf_cli.models.compat import without_partitions
    from rlhf_cli.models.loading import language_model_class

    with without_partitions(), torch.device("meta"):
        model = language_model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return Weights(
        sizes={name: parameter.numel() for name, parameter in model.named_parameters()},
        embedding=embedding.weight.numel(),
        head=0 if head is None else head.weight.numel(),
        has_tied_head=head is not None and head.weight is embedding.weight,
        linears=_linears(model, vision_parts(config)),
    )


def is_part(name: str, parts: Sequence[str]) -> bool:
    """Return whether a parameter or module is in one of these modules."""
    return any(f".{part}." in f".{name}" for part in parts)


def _inactive_experts(sizes: dict[str, int], text: "PretrainedConfig") -> float:
    """Return the parameters of experts that do not process a token."""
    count = next((getattr(text, name) for name in NUM_EXPERTS if getattr(text, name, None)), None)
    active = getattr(text, "num_experts_per_tok", None)
    if not count or not active:
        return 0
    return (1 - active / count) * sum(size for name, size in sizes.items() if ".experts." in name)


NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configurations."""


def _cache_values(text: "PretrainedConfig", key_width: int) -> int:
    """Return the cached values per token and attention layer: keys and values, or a latent vector (MLA)."""
    latent = getattr(text, "kv_lora_rank", None)
    return latent + text.qk_rope_head_dim if latent else 2 * key_width


def _linears(model: Any, vision: Sequence[str]) -> tuple[tuple[str, int, int, int], ...]:
    import torch

    head = model.get_output_embeddings()
    found = Counter(
        (name.rpartition(".")[2], module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and not is_part(name, vision)
    )
    return tuple((*layer, count) for layer, count in found.items())


def kept_values(config: "PretrainedConfig") -> int:
    """Return the activation values per token without gradient checkpointing."""
    return sum(_values_of_layers(config.get_text_config()))


def recomputed_values(config: "PretrainedConfig") -> int:
    """Return the activation values per token with gradient checkpointing: all layer inputs, plus the largest layer."""
    text = config.get_text_config()
    return int(text.num_hidden_layers * text.hidden_size + largest_layer(text))


def largest_layer(text: "PretrainedConfig") -> int:
    """Return the activation values per token of the layer that keeps most."""
    return max(_values_of_layers(text))


def _values_of_layers(text: "PretrainedConfig") -> list[int]:
    num_recurrent = num_recurrent_layers(text)
    recurrent = KEPT_OF_HIDDEN * text.hidden_size + _mlp_values(text) + recurrent_values(text) if num_recurrent else 0
    # Which layers are recurrent does not matter for sums and maxima, but layers may differ in head size.
    layers = layer_configs(text)[num_recurrent:]
    return [recurrent] * num_recurrent + [_attention_values(layer) + _mlp_values(text) for layer in layers]


def _mlp_values(text: "PretrainedConfig") -> int:
    """Return the values of an MLP: gate, its activation, projection and product; and inputs and outputs of experts."""
    num_active = getattr(text, "num_experts_per_tok", None) or 0
    return int(4 * active_width(text) + 2 * num_active * text.hidden_size)


def _attention_values(text: "PretrainedConfig") -> int:
    """Return the values that a layer keeps for its norms and attention.

    Both norms keep a float32 input, a rounded result and their output. Queries, keys, values and the output of
    attention are kept once. Norms of queries and keys keep three more values.
    """
    of_type = _MORE_HIDDEN.get(text.model_type, 0)
    return int((8 + of_type) * text.hidden_size + (5 if _has_head_norms(text) else 2) * _head_values(text))


def _has_head_norms(text: "PretrainedConfig") -> bool:
    return text.model_type in _HEAD_NORMS


def _head_values(text: "PretrainedConfig") -> int:
    return text.num_attention_heads * head_size(text) + key_value_width(text)


def fused_savings(text: "PretrainedConfig") -> int:
    """Return the values per token that a layer does not keep with Liger's kernels.

    A norm keeps its input in bf16 and its output; an MLP no activation of its gate.

    Example: a layer of Qwen2.5-1.5B saves 4 * 1,536 + 8,960 of 51,712 values.
    """
    kernels = fused_kernels(text)
    if "rms_norm" not in kernels:
        return 0
    heads = 2 * _head_values(text) if _has_head_norms(text) else 0
    return int(4 * text.hidden_size + heads + _fused_width(text))


def _fused_width(text: "PretrainedConfig") -> int:
    """Return the width of an MLP for which Liger has a kernel, otherwise 0."""
    return active_width(text) if {"swiglu", "geglu"}.intersection(fused_kernels(text)) else 0


def backward_values(text: "PretrainedConfig", *, is_fused: bool = False) -> int:
    """Return the gradients per token in the backward pass of an MLP, where a layer has most: one per kept value.

    Liger's kernels write three of four into kept values.
    """
    return int(_mlp_values(text) + 2 * text.hidden_size - (3 * _fused_width(text) if is_fused else 0))


def recurrent_values(text: "PretrainedConfig") -> int:
    """Return the values that a recurrent layer keeps per token in addition to its MLP and `KEPT_OF_HIDDEN`.

    Measured on bf16 tensors that PyTorch code saves, most of them float32. Kernels save fewer. The delta rules compute
    with chunks of 64 tokens.
    """
    sizes = text.to_dict()

    def size(*names: str) -> int:
        return int(next((sizes[name] for name in names if sizes.get(name)), 0))

    heads, state = size("mamba_n_heads", "mamba_num_heads"), size("mamba_d_state", "ssm_state_size")
    if heads:
        inner, chunk = heads * size("mamba_d_head", "mamba_head_dim"), size("mamba_chunk_size", "chunk_size")
        return 26 * inner + 6 * heads * chunk + 12 * heads * state
    if state:
        return size("mamba_expand") * text.hidden_size * (14 + 7 * state)
    delta = size("linear_num_value_heads") * (18 * size("linear_key_head_dim") + 29 * size("linear_value_head_dim"))
    # Kimi-Linear has a decay for each channel.
    return delta or 490 * size("linear_num_heads") * size("linear_head_dim")
