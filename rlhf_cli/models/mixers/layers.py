"""Find the layers of a model that mix tokens, by class.

Configurations are not enough: some have no `layer_types`, others use their own names. A module mixes tokens if its
forward pass takes a cache, which every decoder needs to generate.
"""

import inspect
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_cli.errors import UsageError
from rlhf_cli.models.compat import without_partitions

CACHES = frozenset({"past_key_values", "past_key_value", "cache_params", "layer_past", "use_cache", "state"})
"""Argument names of caches in transformers layers."""
CUSTOM = (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification)
"""Classes that custom model code may define instead of `AutoModel`."""
ATTENTION = "attention"
MIXERS = {
    "gated delta net": ("GatedDeltaNet",),
    "Kimi delta attention": ("DeltaAttention",),
    "lightning attention": ("LightningAttention",),
    "Mamba 1": ("JambaMambaMixer",),
    "Mamba 2": ("MambaLayer", "BambaMixer", "FalconH1Mixer", "Mamba2Mixer"),
    "RG-LRU": ("RecurrentBlock",),
    "short convolution": ("ShortConv",),
}
"""Layers that mix tokens without attention, with the ends of their class names in transformers."""
KERNELS = {
    "gated delta net": ("fla", "hybrid"),
    "Kimi delta attention": ("fla", "hybrid"),
    "Mamba 1": ("mamba_ssm", "mamba"),
    "Mamba 2": ("mamba_ssm", "mamba"),
}
"""Modules with GPU kernels that transformers uses if they are installed, and the extras that install them."""
WITHOUT_INITIAL_STATE = frozenset({"Mamba 1", "RG-LRU"})
"""Layers that always begin with a zero state if they compute several tokens."""

WITHOUT_ENGINE = frozenset({"minimax", "recurrent_gemma", "rwkv", "xlstm"})
"""Model types that vLLM does not have, and whose rows the transformers engine cannot select or measure."""
OWN_STATES = WITHOUT_ENGINE | {"falcon_mamba", "mamba", "mamba2"}
"""Model types whose rows the transformers engine cannot select or measure.

They keep states in their modules or in a cache of their own, or have no attention layers at all.
"""
VLLM_CPU_STATES = frozenset({"falcon_h1", "granitemoehybrid", "nemotron_h"})
"""Model types with recurrent layers that vLLM's CPU build runs, without experts (tests/e2e/test_vllm_hybrid.py)."""


@dataclass(frozen=True)
class Layers:
    """Layers of a model that mix tokens.

    - `num_attention`: number of attention layers.
    - `mixers`: names in `MIXERS` of its other layers.
    - `unsupported`: class names of layers that would mix the sequences in a pack.
    """

    num_attention: int
    mixers: tuple[str, ...]
    unsupported: tuple[str, ...]

    @property
    def can_continue(self) -> bool:
        """Whether a response can continue the state at the end of a prompt that was computed once."""
        return WITHOUT_INITIAL_STATE.isdisjoint(self.mixers)


def refuse_own_states(architecture: PretrainedConfig) -> None:
    """Raise UsageError if the transformers engine cannot manage the states of this model."""
    kind = architecture.model_type
    if kind in OWN_STATES:
        raise UsageError(
            f"the transformers engine cannot generate with models of type {kind}, whose states it does not support: "
            + ("vLLM does not have them either" if kind in WITHOUT_ENGINE else "use vLLM on a GPU")
        )


def mixers_note(layers: Layers, *, on_gpu: bool) -> dict[str, str]:
    """Return a note if a GPU must run PyTorch code, because kernels are not installed."""
    slow = [name for name in layers.mixers if name in KERNELS and find_spec(KERNELS[name][0]) is None]
    if not slow or not on_gpu:
        return {}
    extras = ",".join(sorted({KERNELS[name][1] for name in slow}))
    return {"Layers": f"{' and '.join(slow)} in PyTorch code, which is slow: pip install 'rlhf-cli[{extras}]'"}


def layers_of(architecture: PretrainedConfig, *, trust_remote_code: bool) -> Layers:
    """Return the layers of a model with this configuration, without allocating weights."""
    classes = getattr(architecture, "auto_map", None) or {}
    auto_class = next((custom for custom in CUSTOM if custom.__name__ in classes), AutoModel)
    # ZeRO-3 would partition the modules, and cannot initialize meta tensors.
    with without_partitions(), torch.device("meta"):
        return layers_in(auto_class.from_config(architecture, trust_remote_code=trust_remote_code))


def layers_in(model: nn.Module) -> Layers:
    """Return the layers of a model."""
    by_class = {cls: kind_of(cls) for cls in {type(part) for part in model.modules()}}
    kinds = {name: kind for name, part in model.named_modules() if (kind := by_class[type(part)]) is not None}
    # An unknown module with another mixer inside is only its container.
    unsupported = {
        type(model.get_submodule(name)).__name__
        for name, kind in kinds.items()
        if not kind and not any(other.startswith(f"{name}.") for other in kinds)
    }
    named = [*kinds.values()]
    return Layers(named.count(ATTENTION), tuple(sorted(MIXERS.keys() & {*named})), tuple(sorted(unsupported)))


def kind_of(cls: type[nn.Module]) -> str | None:
    """Return how modules of this class mix tokens: attention, a name in `MIXERS`, or "" if unknown.

    None if they do not mix tokens.
    """
    takes_cache = not CACHES.isdisjoint(inspect.signature(cls.forward).parameters)
    # Decoder layers and models take a cache only to pass it on.
    if not takes_cache or issubclass(cls, GradientCheckpointingLayer | PreTrainedModel):
        return None
    # Attention through the transformers interface runs the kernels in models/attention, which separate sequences.
    if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(cls.forward):
        return ATTENTION
    # Custom code has operations of its own under the same class names.
    is_known = cls.__module__.startswith("transformers.models.")
    return next((name for name, ends in MIXERS.items() if is_known and cls.__name__.endswith(ends)), "")


def fix_model(model: nn.Module) -> None:
    """Change what transformers computes or names wrongly.

    - Nemotron-H: transformers clamps time steps at `time_step_min` in a scan over several tokens, but not in its own
      decoding of single tokens; vLLM and the published code use `time_step_limit`. Otherwise log-probs differ by 1e-3
      between engines.
    - Llama 4: `get_decoder` looks for the decoder under a name that only the vision-language model has.
    """
    for part in model.modules():
        if type(part).__name__ == "NemotronHMamba2Mixer":
            part.time_step_limit = tuple(part.config.time_step_limit)
    if getattr(model, "base_model_prefix", None) == "language_model" and not hasattr(model, "language_model"):
        model.base_model_prefix = "model"
