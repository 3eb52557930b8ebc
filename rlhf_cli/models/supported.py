"""The model types that train, as a table: for `rlhf doctor --models` and the documentation."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
from transformers import AutoConfig, PretrainedConfig

from rlhf_cli.models.adapters import UNCALLED
from rlhf_cli.models.attention.table import attention_needs, resolve_attention
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.mixers.layers import (
    ATTENTION,
    KERNELS,
    MIXERS,
    VLLM_CPU_STATES,
    WITHOUT_ENGINE,
    WITHOUT_INITIAL_STATE,
    kind_of,
)
from rlhf_cli.models.requirements import PACKED_TYPES
from rlhf_cli.models.routing_replay import REPLAYED_TYPES
from rlhf_cli.models.vision.families.table import FAMILIES, TEXT_ONLY

HEADER = (
    *("types", "layers", "images", "experts", "shared prompts", "LoRA", "engine on a CPU", "engine on a GPU"),
    *("GPU kernels", "tested"),
)
TESTED = {
    "training": (
        ("tests/conftest.py", ("llama", "qwen2", "qwen3_moe")),
        ("tests/e2e/test_hybrid_models.py", ("granitemoehybrid", "lfm2", "qwen3_5", "qwen3_5_text")),
        ("tests/helpers/tiny_vision.py", ("idefics3", "llava", "qwen2_5_vl", "qwen3_5_moe", "qwen3_vl", "smolvlm")),
        ("tests/helpers/tiny_text_only.py", ("gemma3",)),
    ),
    "transformers": (
        ("tests/conftest.py", ("qwen2",)),
        (
            "tests/unit/backends/test_hybrid_decoding.py",
            (
                *("bamba", "falcon_h1", "gemma4_text", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
                *("nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
            ),
        ),
        (
            "tests/helpers/tiny_vision.py",
            ("idefics3", "llava", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "smolvlm"),
        ),
        ("tests/helpers/tiny_text_only.py", ("gemma3",)),
    ),
    "vLLM": (
        ("tests/conftest.py", ("qwen2", "qwen3_moe")),
        ("tests/e2e/test_vllm_hybrid.py", ("falcon_h1", "gemma4_text", "granitemoehybrid", "nemotron_h")),
        ("tests/e2e/test_vllm_pictures.py", ("idefics3", "llava", "qwen2_5_vl", "qwen3_vl")),
        ("tests/helpers/tiny_text_only.py", ("gemma3",)),
    ),
}
"""Tests besides packs, of training steps or commands and of the engines' log-probs: the files that make the models."""


@dataclass(frozen=True)
class SupportedType:
    """A model type whose sequences in a pack are independent, exactly.

    - `kind`: `model_type` in the configuration.
    - `layers`: attention, and names in `MIXERS`, that its models may have.
    - `has_experts`: whether its MLP is, or may be, a mixture of experts.
    - `replays_routing`: whether `--rollout_routing_replay` supports it.
    - `images`: whether it reads images: "yes", "no", or "text only" for a vision-language model that does not.
    - `kernel`: attention kernel for packs on a CPU.
    """

    kind: str
    layers: tuple[str, ...]
    has_experts: bool
    replays_routing: bool
    images: str
    kernel: str

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table after the type."""
        mixers = {*self.layers} - {ATTENTION}
        extras = sorted({KERNELS[mixer][1] for mixer in mixers & KERNELS.keys()})
        tests = [name for name, files in TESTED.items() if any(self.kind in kinds for _, kinds in files)]
        return (
            ", ".join(self.layers),
            self.images,
            "replayed" if self.replays_routing else _yes(self.has_experts),
            _yes(self.kernel == VARLEN and not mixers & WITHOUT_INITIAL_STATE),
            self.adapted(),
            self._engine_on_cpu(bool(mixers)),
            "none" if self.kind in WITHOUT_ENGINE else "vLLM, transformers",
            ", ".join(f"`rlhf-cli[{extra}]`" for extra in extras),
            ", ".join(["packs", *tests]),
        )

    def adapted(self) -> str:
        """Return what adapters on all linear layers leave out: stacks of matrices, and linear layers not called."""
        left_out = [
            name for name, holds in (("experts", self.has_experts), ("gates", "RG-LRU" in self.layers)) if holds
        ]
        left_out += [f"`{UNCALLED[self.kind]}`"] if self.kind in UNCALLED else []
        return f"not {', '.join(left_out)}" if left_out else "yes"

    def _engine_on_cpu(self, has_mixers: bool) -> str:
        if self.kind in WITHOUT_ENGINE:
            return "none"
        if not has_mixers:
            return "vLLM, transformers"
        if self.kind not in VLLM_CPU_STATES:
            return "transformers"
        return "vLLM without experts, transformers" if self.has_experts else "vLLM, transformers"


def models_table() -> str:
    """Return a Markdown table of the supported types, those with equal cells in one row."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for one in supported_types():
        kinds.setdefault(one.cells(), []).append(f"`{one.kind}`")
    rows = [HEADER, ("---",) * len(HEADER), *((", ".join(named), *cells) for cells, named in sorted(kinds.items()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def supported_types() -> Iterator[SupportedType]:
    """Yield all supported types in alphabetical order."""
    for kind in sorted(PACKED_TYPES | FAMILIES.keys() | TEXT_ONLY.keys()):
        architecture = AutoConfig.for_model(kind)
        text = architecture.get_text_config()
        has_experts = any("experts" in name for name in text.to_dict())
        replays_routing = text.model_type in REPLAYED_TYPES
        images = "text only" if kind in TEXT_ONLY else _yes(kind in FAMILIES)
        kernel = resolve_attention("auto", device="cpu", dtype=torch.float32, needs=attention_needs(architecture))
        yield SupportedType(kind, _layers_of(text), has_experts, replays_routing, images, kernel)


def _layers_of(text: PretrainedConfig) -> tuple[str, ...]:
    """Return the layers that mix tokens in the module of a text model, whatever a configuration selects."""
    name = type(text).__module__.replace(".configuration_", ".modeling_")
    import_module(name)
    classes = [cls for _, cls in inspect.getmembers(sys.modules[name], inspect.isclass) if cls.__module__ == name]
    kinds = {kind_of(cls) for cls in classes if hasattr(cls, "forward")}
    return tuple(kind for kind in (ATTENTION, *sorted(MIXERS)) if kind in kinds)
