"""The weights of models, read into the modules that are trained.

A model's computation on a pack is in `policy`, how it becomes a folder again in `saving`.
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
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from rlhf_cli.config.model import ModelConfig, ModelSource
from rlhf_cli.errors import UsageError
from rlhf_cli.models.classifiers import is_token_classifier, refuse_classifier, refuse_several_labels
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.finding import FoundModel, find_model, naming_the_model
from rlhf_cli.models.fused import fuse
from rlhf_cli.models.requirements import check_loadable, needs_fused_kernels, packed_attention
from rlhf_cli.models.tensor_parallel import whole_shape
from rlhf_cli.models.vision.attention import attention_of_parts, use_tower_kernel
from rlhf_cli.models.vision.families.processing import PictureProcessing
from rlhf_cli.models.vision.families.table import find_processing, names_of_parts, takes_pictures
from rlhf_cli.models.vision.scoring import scoring_class
from rlhf_cli.models.vision.tower import PROCESSING


def load_causal_lm(
    config: ModelConfig,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
    in_4bit: bool = False,
) -> PreTrainedModel:
    """Return the causal language model in evaluation mode, attention and gradient checkpointing set.

    Weights are read onto `device`, by default into host memory. With `partition`, a context of ZeRO-3, they are
    partitioned over ranks while they are loaded; with `in_4bit` they are quantised on this process's GPU, for training
    an adapter on them. UsageError for a model that gives scores.
    """
    found = find_model(config)
    refuse_classifier(found.architecture, f"pretrain {config.pretrain!r}")
    auto_class = language_model_class(found.architecture)
    return _load(auto_class, config, found, partition=partition, in_4bit=in_4bit, device=device)


def language_model_class(architecture: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Return the class of transformers that loads a language model of this configuration, with its tower if any."""
    return AutoModelForImageTextToText if takes_pictures(architecture) else AutoModelForCausalLM


def sequence_classifier_class(architecture: PretrainedConfig) -> Any:
    """Return the class that loads a model of this configuration with a head for scores, with its tower if any."""
    return scoring_class(architecture) if takes_pictures(architecture) else AutoModelForSequenceClassification


def load_value_backbone(
    config: ModelConfig,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
    in_4bit: bool = False,
) -> PreTrainedModel:
    """Return the model with a scalar head `score`; a head that the folder does not have starts near zero, always the
    same.

    Its weights are normal with spread 1 / (hidden size + 1): normed hidden states then give values well under 1.
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
    """Return the model with the head `score` that its folder has. Raise UsageError if it has none.

    The head has one number, or two numbers for the classes wrong and right.
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
    """Return the modules of a model in 4 bits that stay as they are: heads, and all that pictures pass through.

    A tower is a small part of the memory, and an error in it is an error in every token of a picture.
    """
    return ["lm_head", "score", *names_of_parts(architecture)]


def _quantised(config: ModelConfig, architecture: PretrainedConfig) -> dict[str, object]:
    """Return the arguments of `from_pretrained` that quantise linear layers (NF4) on this process's GPU."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[config.param_dtype],
        llm_int8_skip_modules=in_run_type(architecture),
    )
    return {"quantization_config": quantization, "device_map": {"": torch.cuda.current_device()}}


def placed_on(device: torch.device | None) -> dict[str, object]:
    """Return what `from_pretrained` takes to read weights straight onto a GPU, without a copy in host memory."""
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
    processing = picture_processing(config, found)
    _define_classes(architecture)
    with partition or contextlib.nullcontext(), naming_the_model(path, "the model"):
        model, report = auto_class.from_pretrained(
            path,
            dtype=DTYPES[config.param_dtype],
            attn_implementation=attention_of_parts(kernel, architecture),
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **(_quantised(config, architecture) if in_4bit else placed_on(None if partition else device)),
            **options,
        )
    if not model.is_backend_compatible():
        raise UsageError(f"{type(model).__name__} cannot be trained on packs: its attention takes no other kernel")
    if not config.trains_with_dropout:
        switch_off_dropout(model)
    _complete_weights(model, path, report, has_score_head=has_score_head)
    if processing is not None:
        setattr(model, PROCESSING, processing)
        use_tower_kernel(model, kernel)
    if next(model.parameters()).is_cuda and needs_fused_kernels(config, architecture):
        fuse(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.activation_offload:
            keep = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.cuda.is_available())
            keep_saved_tensors(model.get_decoder(), keep)
    if config.compile_model:
        # In place: no name in the state dict changes. Packs differ in length, so shapes are symbols from the start.
        model.get_decoder().compile(dynamic=True)
    return model


def switch_off_dropout(model: nn.Module) -> None:
    """Make training steps compute the same as evaluation: no dropout, no dropped layers, no jitter.

    The mode itself has to stay `train`, on which recomputed layers depend, and adapters have dropout of their own. The
    configuration that is saved with the model keeps its values.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):  # F.dropout with p from an attribute, layerdrop, router_jitter
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def picture_processing(config: ModelSource, found: FoundModel) -> PictureProcessing | None:
    """Return how the model cuts pictures, None for a text model."""
    if not takes_pictures(found.architecture):
        return None
    return find_processing(found.path, found.architecture, trust_remote_code=config.trust_remote_code)


def _define_classes(architecture: PretrainedConfig) -> None:
    """Import the source of a model of transformers, so that its classes are there before ZeRO-3's context begins.

    When the context ends, DeepSpeed gives each class that was defined within it the `__init__` from before its
    decorators, which experts need: a second mixture of the same type could not run.
    """
    source = type(architecture).__module__.replace(".configuration_", ".modeling_")
    with contextlib.suppress(ImportError):  # code that comes with a model has other names
        importlib.import_module(source)


def keep_saved_tensors(decoder: nn.Module, keep: Callable[[], AbstractContextManager[object]]) -> None:
    """Let the decoder run within the context `keep`, which takes the tensors that are saved for the backward pass.

    With gradient checkpointing they are the inputs of its layers; tensors within a layer are computed again.
    """
    plain = decoder.forward

    @functools.wraps(plain)
    def forward(*inputs: object, **options: object) -> object:
        with keep():
            return plain(*inputs, **options)

    decoder.forward = forward  # type: ignore[method-assign]


def _complete_weights(model: PreTrainedModel, path: str, report: dict[str, Any], *, has_score_head: bool) -> None:
    """Fill a scalar head that the folder need not have; any other weight that is missing is a UsageError."""
    missing = set(report["missing_keys"]) - set(model.all_tied_weights_keys)
    if "score.weight" in missing and not has_score_head:
        missing.remove("score.weight")
        fill(model.score.weight, _value_head(model.config.get_text_config().hidden_size))
    wrong = sorted(missing) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise UsageError(
            f"pretrain {path!r}: the weights do not fit its config.json: {len(wrong)} missing or of another "
            f"shape, the first is {wrong[0]}"
        )


def _value_head(hidden_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)


def fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set a parameter, or this rank's share of one that ZeRO-3 has partitioned."""
    with torch.no_grad():
        if not hasattr(parameter, "ds_tensor"):
            parameter.copy_(values)
            return
        shard = parameter.ds_tensor
        start = torch.distributed.get_rank(parameter.ds_process_group) * shard.numel()
        own = values.flatten()[start : start + shard.numel()]
        shard[: own.numel()].copy_(own)


def num_parameters(model: nn.Module) -> int:
    """Return the parameters of the whole model, each counted once, also where ranks have parts of them."""
    return sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())
