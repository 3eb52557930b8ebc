"""Liger's fused Triton kernels for norms, rotary embeddings and MLPs: supported models, and patching.

Liger's losses are not used, because `logprobs` computes them in chunks, and neither are its expert kernels.
"""

import inspect
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from rlhf_cli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

OLDEST = Version("0.8.5")
"""Oldest reviewed release. Earlier ones rotate the full head, which is wrong for models with partial rotary embeddings.
"""
_DENSE, _GATED_BY_GELU, _EXPERTS = ("rms_norm", "rope", "swiglu"), ("rms_norm", "rope", "geglu"), ("rms_norm", "rope")
_KERNELS = (
    dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3"), _DENSE)
    | dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GATED_BY_GELU)
    | dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), _EXPERTS)
)
"""Kernels by model type, each compared with the transformers operators in forward and backward."""
_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""Activations that an MLP kernel implements, independent of the model configuration."""


def fused_kernels(architecture: "PretrainedConfig") -> tuple[str, ...]:
    """Return the kernels for this architecture; empty for other types."""
    activation = getattr(architecture, "hidden_activation", None) or getattr(architecture, "hidden_act", None)
    kernels = _KERNELS.get(architecture.model_type, ())
    # Liger ignores hidden_act, so an MLP with another activation would silently compute something else.
    return tuple(name for name in kernels if activation in _ACTIVATIONS.get(name, (activation,)))


def is_installed() -> bool:
    """Return whether a recent enough liger-kernel is installed."""
    try:
        return Version(version("liger-kernel")) >= OLDEST
    except PackageNotFoundError:
        return False


def _why_not_fused(architecture: "PretrainedConfig", *, on_gpu: bool, compiled: bool, installed: bool) -> str | None:
    """Return why fused kernels cannot be used, as a sentence ending, or None if they can."""
    reasons = (
        (not on_gpu, " needs an NVIDIA GPU for its Triton kernels"),
        (not installed, f": liger-kernel {OLDEST} or newer is not installed (extra `liger`)"),
        (compiled, " cannot be combined with compile_model, which fuses the same operations"),
        (not fused_kernels(architecture), f": no kernels for models of type {architecture.model_type}"),
    )
    return next((sentence for applies, sentence in reasons if applies), None)


def uses_fused_kernels(
    wanted: bool | None, architecture: "PretrainedConfig", *, on_gpu: bool, compiled: bool, installed: bool
) -> bool:
    """Return whether to use fused kernels: by default if possible. On a GPU, log why not.

    Raises:
        UsageError: they are requested but cannot be used.
    """
    reason = _why_not_fused(architecture, on_gpu=on_gpu, compiled=compiled, installed=installed)
    if wanted and reason is not None:
        raise UsageError(f"use_liger_kernel{reason}")
    if wanted is None and reason is not None and on_gpu:
        print(f"Liger kernels are off: use_liger_kernel{reason}", flush=True)
    return wanted is not False and reason is None


def fuse(model: "PreTrainedModel", *, apply: Callable[..., None] | None = None) -> None:
    """Patch a model on a GPU with Liger kernels, and log which.

    Liger also replaces classes and the rotary function in the model's module for the full process. This function
    restores the classes and selects the rotary function by device, since the same process may run a model on the CPU.
    """
    apply = apply or _liger_function(model.config.model_type)
    chosen = fused_kernels(model.config)
    # Liger's functions differ in arguments: those for experts have no swiglu.
    known = inspect.signature(apply).parameters
    switches = {name: name in chosen for name in ("rms_norm", "rope", "swiglu", "geglu") if name in known}
    # Pass the decoder: with the full model, Liger would also replace the forward pass that computes the loss.
    decoder = model.get_decoder()
    source = vars(sys.modules[type(decoder).__module__])
    before = dict(source)
    apply(model=decoder, cross_entropy=False, fused_linear_cross_entropy=False, **switches)
    fused, plain = source.get("apply_rotary_pos_emb"), before.get("apply_rotary_pos_emb")
    source.update(before)
    if fused is not plain and fused is not None and plain is not None:
        source["apply_rotary_pos_emb"] = by_device(fused, plain)
    print(f"Liger kernels: {', '.join(chosen)}", flush=True)


def by_device(fused: Callable[..., object], plain: Callable[..., object]) -> Callable[..., object]:
    """Return a rotary function that calls `fused` on a GPU and `plain` elsewhere."""

    def rotate(query: Any, *args: object, **options: object) -> object:
        return (fused if query.is_cuda else plain)(query, *args, **options)

    return rotate


def _liger_function(model_type: str) -> Callable[..., None]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    function: Callable[..., None] = MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
    return function
