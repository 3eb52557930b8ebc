"""Load model weights into modules for training.

`policy` runs models on packs, and `saving` writes them as folders.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from rlhf_cli.config.model import ModelConfig, ModelSource
from rlhf_cli.errors import UsageError
from rlhf_cli.models.checkpoint_names import forget_unused_prefixes
from rlhf_cli.models.classifiers import is_token_classifier, refuse_classifier, refuse_several_labels
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.finding import FoundModel, find_model, naming_the_model
from rlhf_cli.models.fused import fuse
from rlhf_cli.models.mixers.layers import fix_model
from rlhf_cli.models.mixers.remainders import keep_float32
from rlhf_cli.models.mixers.separation import require_separate_sequences
from rlhf_cli.models.requirements import check_loadable, needs_fused_kernels, packed_attention
from rlhf_cli.models.score_heads import sequence_classifier_class
from rlhf_cli.models.tensor_parallel import whole_shape
from rlhf_cli.models.unused_weights import ORIGIN
from rlhf_cli.models.vision.attention import attention_of_parts, use_tower_kernel
from rlhf_cli.models.vision.families.processing import PictureProcessing
from rlhf_cli.models.vision.families.table import find_processing, is_multimodal, names_of_parts, takes_pictures
from rlhf_cli.models.vision.tower import PROCESSING


def load_causal_lm(
    config: ModelConfig,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
    in_4bit: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode, with attention and gradient checkpointing configured.

    Weights are loaded onto `device`, by default into host memory. `partition`, a ZeRO-3 context, partitions them over
    ranks during loading. `in_4bit` quantizes them on this process's GPU, to train an adapter. Raises UsageError for a
    model that returns scores.
    """
    found = find_model(config)
    refuse_classifier(found.architecture, f"pretrain {config.pretrain!r}")
    auto_class = language_model_class(found.architecture)
    return _load(auto_class, config, found, partition=partition, in_4bit=in_4bit, device=device)


def language_model_class(architecture: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Return the transformers class that loads a language model, including any vision encoder."""
    return AutoModelForImageTextToText if is_multimodal(architecture) else AutoModelForCausalLM


def load_value_backbone(
    config: ModelConfig,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
    in_4bit: bool = False,
) -> PreTrainedModel:
    """Load a model with a scalar `score` head. A head that the folder lacks gets a fixed initialization near zero.

    Head weights are normal with std 1 / (hidden size + 1), so normalized hidden states give values well below 1.
    """
    found = find_model(config)
    refuse_several_labels(found.architecture, f"pretrain {config.pretrain!r}")
    return _load(
        sequence_classifier_class(found.architecture),
        config,
        found,
        partition=partition,
        in_4bit=in_4bit,
        device=device,
        num_labels=1,
    )


def load_reward_model(
    config: ModelConfig,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
) -> PreTrainedModel:
    """Load a model with its `score` head. Raises UsageError if the folder has no head.

    The head has one output, or two for the classes wrong and right.
    """
    found = find_model(config)
    has_classes = is_token_classifier(found.architecture)
    return _load(
        AutoModelForTokenClassification if has_classes else sequence_classifier_class(found.architecture),
        config,
        found,
        partition=partition,
        device=device,
        num_labels=2 if has_classes else 1,
        has_score_head=True,
    )


def in_run_type(architecture: PretrainedConfig) -> list[str]:
    """Return modules that 4-bit models keep unquantized: heads, and all vision modules.

    A vision encoder needs little memory, and errors in it affect every image token.
    """
    return ["lm_head", "score", *names_of_parts(architecture)]


def _quantised(config: ModelConfig, architecture: PretrainedConfig) -> dict[str, object]:
    """Return `from_pretrained` arguments that quantize linear layers (NF4) on this process's GPU."""
    # The QLoRA settings (arXiv 2305.14314): NF4 with double quantization.
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        # Products in the dtype of the adapter: bitsandbytes defaults to float32.
        bnb_4bit_compute_dtype=DTYPES[config.param_dtype],
        llm_int8_skip_modules=in_run_type(architecture),
    )
    return {"quantization_config": quantization, "device_map": {"": torch.cuda.current_device()}}


def placed_on(device: torch.device | None) -> dict[str, object]:
    """Return `from_pretrained` arguments that load weights directly onto a GPU, without a copy in host memory."""
    return {} if device is None or device.type == "cpu" else {"device_map": {"": device}}


def _load(
    auto_class: Any,
    config: ModelConfig,
    found: FoundModel,
    *,
    partition: AbstractContextManager[None] | None,
    in_4bit: bool = False,
    has_score_head: bool = False,
    device: torch.device | None = None,
    **options: object,
) -> PreTrainedModel:
    path, architecture = found.path, found.architecture
    check_loadable(config, architecture, in_4bit=in_4bit, partitioned=partition is not None)
    kernel = packed_attention(config, architecture)
    processing = _picture_processing(config, found)
    _define_classes(architecture)
    with partition or contextlib.nullcontext(), naming_the_model(path, "the model"):
        model, report = auto_class.from_pretrained(
            path,
            dtype=DTYPES[config.param_dtype],
            attn_implementation=attention_of_parts(kernel, architecture),
            trust_remote_code=config.trust_remote_code,
            # transformers only warns about missing weights and initializes them at random.
            output_loading_info=True,
            **(_quantised(config, architecture) if in_4bit else placed_on(None if partition else device)),
            **options,
        )
    forget_unused_prefixes(model)
    setattr(model, ORIGIN, path)
    fix_model(model)
    keep_float32(model, path)
    if not config.keep_dropout:
        switch_off_dropout(model)
    _complete_weights(model, path, report, has_score_head=has_score_head)
    # On a machine with a GPU, kernels may not run before the model is moved there, nor on partitioned weights.
    runs_here = partition is None and (model.device.type == "cuda" or not torch.cuda.is_available())
    if runs_here and not type(model).__module__.startswith("transformers."):
        require_separate_sequences(model)
    if processing is not None:
        setattr(model, PROCESSING, processing)
        use_tower_kernel(model, kernel)
    # After loading: Liger patches the forward methods of existing modules.
    if next(model.parameters()).is_cuda and needs_fused_kernels(config, architecture):
        fuse(model)
    if config.gradient_checkpointing:
        # Reentrant checkpointing needs an input with a gradient, which a frozen base under an adapter lacks.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.activation_offload:
            # Pinned memory lets copies to the host overlap with computation.
            keep = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.cuda.is_available())
            keep_saved_tensors(model.get_decoder(), keep)
    if config.compile_model:
        # In place, so state dict names do not change. dynamic=True because pack lengths vary: avoid one graph per
        # length.
        model.get_decoder().compile(dynamic=True)
    return model


def switch_off_dropout(model: nn.Module) -> None:
    """Disable dropout, layer drop and router jitter, so that training and evaluation compute the same.

    The model stays in train mode, which gradient checkpointing requires and adapters use for their dropout. The saved
    configuration keeps its values.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        # Attributes passed to F.dropout, and layerdrop and router_jitter.
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _picture_processing(config: ModelSource, found: FoundModel) -> PictureProcessing | None:
    """Return the model's image processing, or None for a model that reads only text."""
    if not takes_pictures(found.architecture):
        return None
    return find_processing(found.path, found.architecture, trust_remote_code=config.trust_remote_code)


def _define_classes(architecture: PretrainedConfig) -> None:
    """Import the transformers module for a model, so that its classes exist before the ZeRO-3 context starts.

    When the context ends, DeepSpeed resets `__init__` of every class defined within it to the undecorated version.
    Expert layers need the decorated one: a second mixture of the same type would fail.
    """
    source = type(architecture).__module__.replace(".configuration_", ".modeling_")
    # Custom model code has other module names.
    with contextlib.suppress(ImportError):
        importlib.import_module(source)


def keep_saved_tensors(decoder: nn.Module, keep: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the decoder within the context `keep`, which stores tensors saved for the backward pass.

    With gradient checkpointing these are the layer inputs; tensors within layers are recomputed.
    """
    plain = decoder.forward

    @functools.wraps(plain)
    def forward(*inputs: object, **options: object) -> object:
        with keep():
            return plain(*inputs, **options)

    decoder.forward = forward  # type: ignore[method-assign]


def _complete_weights(model: PreTrainedModel, path: str, report: dict[str, Any], *, has_score_head: bool) -> None:
    """Initialize a missing scalar head. Any other missing weight raises UsageError."""
    # transformers reports tied copies as missing, although it ties them after loading.
    missing = set(report["missing_keys"]) - set(model.all_tied_weights_keys)
    if "score.weight" in missing and not has_score_head:
        missing.remove("score.weight")
        fill(model.score.weight, _value_head(model.config.get_text_config().hidden_size))
    wrong = sorted(missing) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise UsageError(
            f"pretrain {path!r}: weights do not match config.json: {len(wrong)} missing or with another shape, "
            f"first {wrong[0]}"
        )


def _value_head(hidden_size: int) -> torch.Tensor:
    # A separate generator: the head must not depend on global RNG state, which differs between ranks.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)


def fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set a parameter, or this rank's shard of a parameter partitioned by ZeRO-3."""
    with torch.no_grad():
        if not hasattr(parameter, "ds_tensor"):
            parameter.copy_(values)
            return
        shard = parameter.ds_tensor
        # ZeRO-3 splits the flattened tensor evenly over ranks and pads the last shard.
        start = torch.distributed.get_rank(parameter.ds_process_group) * shard.numel()
        own = values.flatten()[start : start + shard.numel()]
        shard[: own.numel()].copy_(own)


def num_parameters(model: nn.Module) -> int:
    """Count the parameters of the full model, each once, including partitioned ones."""
    return sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())


def parameter_counts(model: nn.Module) -> str:
    """Format the parameter count and, with frozen parameters, the trainable count for the terminal."""
    trained = sum(math.prod(whole_shape(p)) for p in model.parameters() if p.requires_grad)
    total = num_parameters(model)
    counts = f"{total / 1e6:.1f}M parameters"
    return counts if trained == total else f"{counts}, {trained / 1e6:.3g}M trainable"
