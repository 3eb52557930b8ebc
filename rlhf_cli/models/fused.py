"""Liger's fused Triton kernels for norms, rotary embeddings and MLPs: for which models, and put into one.

Leaves out Liger's losses, which `logprobs` computes in chunks, and its kernels for experts.
"""

import inspect
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.errors import UsageError

OLDEST = Version("0.8.5")
"""The release whose source was read; older ones rotate all of a head, also in models that rotate a part of it."""
DENSE, GATED_BY_GELU, EXPERTS = ("rms_norm", "rope", "swiglu"), ("rms_norm", "rope", "geglu"), ("rms_norm", "rope")
KERNELS = (
    dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3"), DENSE)
    | dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GATED_BY_GELU)
    | dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), EXPERTS)
)
"""Kernels by model type. Each type's were compared with transformers' own operators, forward and backward."""
ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""What an MLP kernel computes, whatever the configuration asks for."""


def fused_kernels(architecture: PretrainedConfig) -> tuple[str, ...]:
    """Return the kernels for the layers of a model of this architecture; none for other types."""
    activation = getattr(architecture, "hidden_activation", None) or getattr(architecture, "hidden_act", None)
    kernels = KERNELS.get(architecture.model_type, ())
    return tuple(name for name in kernels if activation in ACTIVATIONS.get(name, (activation,)))


def is_installed() -> bool:
    """Return whether liger-kernel is here, in a release that is recent enough."""
    try:
        return Version(version("liger-kernel")) >= OLDEST
    except PackageNotFoundError:
        return False


def lack_of_fused_kernels(
    architecture: PretrainedConfig, *, on_gpu: bool, compiled: bool, installed: bool
) -> str | None:
    """Return why a model cannot run with fused kernels, as the end of a sentence about them; None if it can."""
    faults = (
        (not on_gpu, " needs an NVIDIA GPU: its kernels are written in Triton"),
        (not installed, f": liger-kernel {OLDEST} or newer is not installed (extra `liger`)"),
        (compiled, " does not go with compile_model, which fuses the same operations"),
        (not fused_kernels(architecture), f": there is none for models of type {architecture.model_type}"),
    )
    return next((sentence for applies, sentence in faults if applies), None)


def uses_fused_kernels(
    wanted: bool | None, architecture: PretrainedConfig, *, on_gpu: bool, compiled: bool, installed: bool
) -> bool:
    """Return whether a model runs with fused kernels: by default if it can; on a GPU the reason against it is logged.

    Raises:
        UsageError: they are asked for and cannot be used.
    """
    fault = lack_of_fused_kernels(architecture, on_gpu=on_gpu, compiled=compiled, installed=installed)
    if wanted and fault is not None:
        raise UsageError(f"use_liger_kernel{fault}")
    if wanted is None and fault is not None and on_gpu:
        print(f"no fused kernels of Liger{fault}", flush=True)
    return wanted is not False and fault is None


def fuse(model: PreTrainedModel, *, apply: Callable[..., None] | None = None) -> None:
    """Let a model on a GPU run with Liger's kernels, and log which.

    Liger also replaces classes and the rotary function of the model's source for the whole process. Classes are put
    back and the function looks at the device, because the same process may run a model on its CPU.
    """
    apply = apply or _liger_function(model.config.model_type)
    chosen = fused_kernels(model.config)
    known = inspect.signature(apply).parameters
    switches = {name: name in chosen for name in ("rms_norm", "rope", "swiglu", "geglu") if name in known}
    decoder = model.get_decoder()  # not the model, whose forward computes the loss
    source = vars(sys.modules[type(decoder).__module__])
    before = dict(source)
    apply(model=decoder, cross_entropy=False, fused_linear_cross_entropy=False, **switches)
    fused, plain = source.get("apply_rotary_pos_emb"), before.get("apply_rotary_pos_emb")
    source.update(before)
    if fused is not plain and fused is not None and plain is not None:
        source["apply_rotary_pos_emb"] = by_device(fused, plain)
    print(f"Liger's kernels for {', '.join(chosen)}", flush=True)


def by_device(fused: Callable[..., object], plain: Callable[..., object]) -> Callable[..., object]:
    """Return a rotary function that is `fused` on a GPU and `plain` elsewhere."""

    def rotate(query: Any, *others: object, **options: object) -> object:
        return (fused if query.is_cuda else plain)(query, *others, **options)

    return rotate


def _liger_function(model_type: str) -> Callable[..., None]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    function: Callable[..., None] = MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
    return function
