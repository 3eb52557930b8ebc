"""LoRA adapters (PEFT) on frozen models: inject, disable, save and load.

Layers are injected into the Hugging Face model, so all code that accepts the model works with an adapter. A `score`
head is trained and saved in full. merging.py merges an adapter into its base.
"""

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.errors import UsageError, first_line
from rlhf_cli.models.adapter_parts import require_known_parts, require_whole_precision
from rlhf_cli.models.classifiers import refuse_classifier, set_padding
from rlhf_cli.models.finding import ADAPTER_FILE, adapter_folder, resolve_model_path
from rlhf_cli.models.folders import whole_folder
from rlhf_cli.models.loading import fill, language_model_class
from rlhf_cli.models.saving import config_to_save, save_tokenizer
from rlhf_cli.models.vision.adapting import EVERYWHERE, language_targets
from rlhf_cli.models.vision.families.table import is_multimodal
from rlhf_cli.models.vision.freezing import freeze_parts
from rlhf_cli.models.weight_files import SafetensorsFiles, fingerprint, fingerprint_of, folder_of

WEIGHTS_FILE = "adapter_model.safetensors"
_BASE_FILE = "adapter_base.json"
"""Base fingerprint, which PEFT's config file lacks."""
MODEL_FILE = "model_config.json"
"""Configuration of base plus adapter. Under the name config.json, transformers would treat the folder as a full model.
"""
HEAD = "score"
_SCORES = "SEQ_CLS"
"""PEFT task type for adapters on a model with a score head."""
PREFIX = "base_model.model."
"""Prefix of all names in PEFT files, where two wrappers surround the model."""
MAGNITUDE = "lora_magnitude_vector"
"""DoRA row magnitudes, which PEFT files store without the `.weight` suffix."""
ACTIVE = "default"
"""PEFT's name for the only adapter, part of in-memory names but not of names in files."""


UNCALLED = {"falcon_h1": "out_proj", "jamba": "dt_proj", "nemotron_h": "out_proj"}
"""Linear layers by model type whose weights are read by other code, so that an adapter might not be applied."""
VARIANTS = ("use_rslora", "use_dora", "exclude_modules", "rank_pattern", "alpha_pattern")
"""Optional adapter settings that most adapters leave at their defaults."""
_OF_NEW_ADAPTERS = (
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "target_modules",
    "exclude_modules",
    "lora_vision_tower",
)
"""Settings that a stored adapter defines itself."""


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter to train, either new or loaded from disk."""

    base: str  # folder or Hub name
    fingerprint: str  # of the base
    config: Any  # PEFT's LoraConfig
    weights: Path | None  # to start from
    in_4bit: bool
    seed: int
    with_tower: bool = False  # also adapt the vision encoder and projector

    def identity(self) -> dict[str, object]:
        """Return the settings that must match for a checkpoint to be resumed."""
        config = self.config
        return {
            "lora_rank": config.r,
            "lora_alpha": config.lora_alpha,
            "lora_dropout": config.lora_dropout,
            "target_modules": sorted_names(config.target_modules),
            "lora_vision_tower": self.with_tower,
            "load_in_4bit": self.in_4bit,
            **{name: sorted_names(getattr(config, name)) or None for name in VARIANTS},
        }

    def start_fingerprint(self) -> str:
        """Hash the base and, if training starts from a stored adapter, its weights."""
        if self.weights is None:
            return self.fingerprint
        _require_weights(self.weights)
        own = fingerprint_of(SafetensorsFiles([self.weights]))
        return hashlib.sha256(f"{self.fingerprint} {own}".encode()).hexdigest()[:32]


def sorted_names(setting: Any) -> Any:
    """Return layer names in a fixed order. PEFT stores a set, or a string pattern."""
    return sorted(setting) if isinstance(setting, set | list) else setting


def plan_adapter(model: ModelConfig, adapter: LoraConfig, *, seed: int) -> AdapterPlan | None:
    """Return the configured adapter: new, stored at `pretrain`, or None.

    Raises:
        UsageError: the adapter at `pretrain` has another rank than requested, its base has changed, or adapter
            settings are set without an adapter.
    """
    folder = adapter_folder(model.pretrain)
    in_4bit = adapter.load_in_4bit
    if folder is None and adapter.lora_rank == 0:
        if in_4bit:
            raise UsageError("load_in_4bit: 4-bit weights cannot be trained directly; set --lora_rank")
        if given := adapter.changed("lora_dropout", *_OF_NEW_ADAPTERS):
            raise UsageError(f"{given} requires an adapter: set --lora_rank")
        return None
    config = _new_config(adapter) if folder is None else _stored_config(folder, adapter)
    base = resolve_model_path(model.pretrain) if folder is None else base_of(folder, config)
    if Path(base).is_dir():
        # Absolute, because the saved adapter is later loaded from other working directories.
        base = str(Path(base).resolve())
    config.base_model_name_or_path = base
    if folder is not None:
        # Check before hashing: a fingerprint reads the weights, which takes longer.
        require_whole_precision(folder, folder_of(base))
    # Not the path but the weights: the folder may have been overwritten since the adapter was trained.
    mark = fingerprint(folder_of(base))
    if folder is not None:
        require_same_base(folder, base, mark)
    weights = None if folder is None else folder / WEIGHTS_FILE
    return AdapterPlan(base, mark, config, weights, in_4bit, seed, adapter.lora_vision_tower)


def require_language_model(model: ModelConfig, architecture: PretrainedConfig, plan: AdapterPlan | None) -> None:
    """Raise UsageError if the model or its adapter returns scores."""
    what = f"--pretrain {model.pretrain!r}"
    refuse_classifier(architecture, what)
    if plan is not None and plan.config.task_type == _SCORES:
        raise UsageError(f"{what} is a reward model adapter, which returns scores: use a language model")


def _new_config(adapter: LoraConfig) -> Any:
    import peft

    everywhere = adapter.target_modules == ["all-linear"]
    return peft.LoraConfig(
        r=adapter.lora_rank,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules="all-linear" if everywhere else adapter.target_modules,
        exclude_modules=adapter.exclude_modules or None,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
    )


def _stored_config(folder: Path, adapter: LoraConfig) -> Any:
    config = read_config(folder)
    if adapter.lora_rank not in (0, config.r):
        raise UsageError(
            f"pretrain {str(folder)!r} is an adapter of rank {config.r}, not {adapter.lora_rank}: omit --lora_rank to "
            "continue training it, or merge it into its base with `rlhf merge` to start a new one"
        )
    if given := adapter.changed(*_OF_NEW_ADAPTERS):
        raise UsageError(f"pretrain {str(folder)!r} is an adapter that defines {given}: omit --{given}")
    if full_layers := set(config.modules_to_save or ()) - {HEAD}:
        raise UsageError(
            f"pretrain {str(folder)!r}: training cannot continue from an adapter with fully trained layers "
            f"({', '.join(sorted(full_layers))}); merge it with `rlhf merge` and start a new adapter"
        )
    # PEFT would freeze an adapter in inference mode. The head is handled here, not by PEFT's modules_to_save wrapper.
    config.inference_mode, config.modules_to_save = False, None
    config.lora_dropout = adapter.lora_dropout
    return config


def read_config(folder: Path) -> Any:
    """Read an adapter's PEFT configuration. Raises UsageError unless it is LoRA."""
    import peft

    config = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, peft.LoraConfig):
        raise UsageError(f"adapter {folder} is of type {config.peft_type.value}: only LoRA is supported")
    require_known_parts(folder, config)
    return config


def base_of(folder: Path, config: Any) -> str:
    """Return the path or Hub name of an adapter's base model. Raises UsageError if it cannot be found."""
    base = config.base_model_name_or_path
    if not base:
        raise UsageError(f"adapter {folder} does not name its base model (base_model_name_or_path)")
    try:
        return resolve_model_path(base)
    except UsageError as error:
        raise UsageError(f"adapter {folder}: its base model cannot be found: {error}") from error


def require_same_base(folder: Path, base: str, mark: str) -> None:
    """Raise UsageError if the adapter was trained on weights with another fingerprint."""
    file = folder / _BASE_FILE
    if file.is_file() and (written := json.loads(file.read_text())["fingerprint"]) != mark:
        raise UsageError(
            f"adapter {folder} was trained on a different base: the weights at {base} have fingerprint {mark}, not "
            f"{written}"
        )


def load_with_adapter(
    load: Callable[..., PreTrainedModel],
    model: ModelConfig,
    plan: AdapterPlan | None,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
) -> PreTrainedModel:
    """Load the model for training: with the planned adapter, or else with the configured parts frozen.

    `load` is `load_causal_lm` or `load_value_backbone`.
    """
    if plan is None:
        hf_model = load(model, device=device, partition=partition)
        freeze_parts(hf_model, model)
        return hf_model
    base = model.model_copy(update={"pretrain": plan.base})
    hf_model = load(base, device=device, partition=partition, in_4bit=plan.in_4bit)
    _put_adapter(hf_model, plan)
    return hf_model


def _put_adapter(model: PreTrainedModel, plan: AdapterPlan) -> None:
    """Inject the adapter and freeze everything except a `score` head.

    A new adapter is a no-op at first, because one of the two factors is zero. Adapter weights have the model dtype;
    DeepSpeed keeps float32 copies of trained weights.
    """
    from peft import inject_adapter_in_model

    # Copy: injection changes the configuration, and a plan may be applied to more than one model.
    config = copy.deepcopy(plan.config)
    config.task_type = _SCORES if _has_head(model) else "CAUSAL_LM"
    if is_multimodal(model.config) and plan.weights is None and not plan.with_tower:
        config.target_modules = language_targets(model, config.target_modules)
    # A stored adapter may list layer names of other models as well.
    if plan.weights is None:
        _leave_out_uncalled(config, model.config.model_type)
        _require_layers(model, config)
    with torch.random.fork_rng():
        # Adapter weights must not depend on random numbers consumed while loading the model.
        torch.manual_seed(plan.seed)
        try:
            # Not get_peft_model: its wrapper class would change parameter names and hide the Hugging Face model.
            inject_adapter_in_model(config, model, adapter_name=ACTIVE)
        except ValueError as error:
            raise UsageError(f"{_naming_setting(config)}: {first_line(error)}") from error
    _require_linear_layers(model)
    # PEFT expands "all-linear" to full module names. Short names also match in tools with other module prefixes.
    config.target_modules = _short_names(model)
    if _has_head(model):
        model.score.requires_grad_(True)
    if plan.weights is not None:
        _load_weights(model, plan.weights)
    model.adapter_fingerprint = plan.fingerprint


def _leave_out_uncalled(config: Any, model_type: str) -> None:
    """Exclude layers in `UNCALLED` from "all-linear". Raises UsageError if they are named.

    PEFT refuses some of them itself. Jamba multiplies with the weight of dt_proj: an adapter would get no gradient.
    """
    name = UNCALLED.get(model_type)
    if name is None:
        return
    if config.target_modules == EVERYWHERE:
        config.exclude_modules = sorted({name, *(config.exclude_modules or ())})
    elif name in config.target_modules:
        raise UsageError(f"target_modules: {name} of {model_type} is not called as a layer and cannot have an adapter")


def _naming_setting(config: Any) -> str:
    return "target_modules, exclude_modules" if config.exclude_modules else "target_modules"


def check_layer_names(plan: AdapterPlan, architecture: PretrainedConfig, *, trust_remote_code: bool) -> None:
    """Raise UsageError, before loading weights, if a new adapter names a layer that does not exist."""
    if plan.weights is None and (isinstance(plan.config.target_modules, set) or plan.config.exclude_modules):
        # Meta tensors: this builds modules without allocating weights.
        with torch.device("meta"):
            model = language_model_class(architecture).from_config(architecture, trust_remote_code=trust_remote_code)
        _require_layers(model, plan.config)


def _require_layers(model: nn.Module, config: Any) -> None:
    """Raise UsageError if a list of layers contains an unknown name. PEFT patterns (strings) are not checked."""
    names = [f".{name}" for name, _ in model.named_modules()]
    for setting in ("target_modules", "exclude_modules"):
        listed = getattr(config, setting)
        for wanted in sorted(listed) if isinstance(listed, list | set | tuple) else ():
            if not any(name.endswith(f".{wanted}") for name in names):
                linear = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if type(part) is nn.Linear}
                raise UsageError(f"{setting}: no layer is named {wanted}; available: {', '.join(sorted(linear))}")


def _has_head(model: nn.Module) -> bool:
    return isinstance(getattr(model, HEAD, None), nn.Linear)


def _tuned(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _require_linear_layers(model: PreTrainedModel) -> None:
    outputs = [model.get_output_embeddings(), getattr(model, HEAD, None)]
    for name, layer in _tuned(model).items():
        if any(layer is output for output in outputs) or not isinstance(layer.get_base_layer(), nn.Linear):
            raise UsageError(
                f"target_modules: {name} does not support adapters, only linear layers below the head do: "
                "list them, as in --target_modules q_proj,v_proj"
            )


def _short_names(model: nn.Module) -> list[str]:
    """Return the last name components of adapted layers, or full names if other layers end the same way."""
    tuned = _tuned(model)
    last = {name.rsplit(".", 1)[-1] for name in tuned}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} | set(tuned)
    alike = {name for name in linear if name.rsplit(".", 1)[-1] in last}
    return sorted(last if alike == set(tuned) else tuned)


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has an adapter."""
    return hasattr(model, "adapter_fingerprint")


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Make the model, or any module that contains it, compute the base model's output within the block.

    For use without gradients.
    """
    layers = list(_tuned(model).values())
    assert layers, "there is no adapter to switch off"
    for layer in layers:
        # PEFT's public switch also toggles requires_grad, but DeepSpeed registered its gradient hooks when it started.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def scales(model: nn.Module) -> dict[str, float]:
    """Return the LoRA scale of each adapted layer, by layer name."""
    return {name: float(layer.scaling[ACTIVE]) for name, layer in _tuned(model).items()}


def file_name(name: str) -> str:
    """Convert a parameter name to its name in PEFT files."""
    in_file = PREFIX + name.replace(f".{ACTIVE}.", ".")
    return in_file.removesuffix(".weight") if in_file.endswith(f"{MAGNITUDE}.weight") else in_file


def weights_read_by_others(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """Return (module, parameter of another module that it reads), so ZeRO-3 can gather the parameter in time.

    DoRA's module reads the base layer weight, and the shape of the first factor.
    """
    pairs = []
    for layer in _tuned(model).values():
        for name, magnitude in getattr(layer, MAGNITUDE).items():
            read = (*layer.get_base_layer().parameters(recurse=False), layer.lora_A[name].weight)
            pairs += [(magnitude, parameter) for parameter in read]
    return pairs


def save_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    *,
    state_dict: dict[str, torch.Tensor],
) -> None:
    """Atomically write an adapter folder that PEFT can load. `state_dict` contains all trained weights in full."""
    with whole_folder(path) as written:
        # safetensors requires contiguous tensors.
        weights = {file_name(name): weight.contiguous() for name, weight in state_dict.items()}
        save_file(weights, written / WEIGHTS_FILE, metadata={"format": "pt"})
        describe_adapter(model, written)
        tokenizer = set_padding(model, tokenizer)
        config_to_save(model).to_json_file(written / MODEL_FILE)
        save_tokenizer(model, tokenizer, written)


def describe_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write PEFT's adapter configuration and the base fingerprint."""
    config = copy.deepcopy(model.peft_config[ACTIVE])
    # As PEFT saves it: loading then returns a frozen adapter unless training is requested.
    config.inference_mode = True
    config.modules_to_save = [HEAD] if _has_head(model) else None
    config.save_pretrained(str(folder))
    (folder / _BASE_FILE).write_text(json.dumps({"fingerprint": model.adapter_fingerprint}) + "\n")


def _require_weights(file: Path) -> None:
    if not file.is_file():
        raise UsageError(f"adapter {file.parent} has an {ADAPTER_FILE} but no {file.name}")


def _load_weights(model: PreTrainedModel, file: Path) -> None:
    _require_weights(file)
    weights = load_file(file)
    wanted = {file_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    # A policy adapter has no head, so a critic that starts from it gets a new one.
    missing = {name for name in wanted if name not in weights and not name.endswith(f"{HEAD}.weight")}
    problem = min(missing | (weights.keys() - wanted.keys()), default="")
    for name, parameter in wanted.items():
        # Under ZeRO-3 the local tensor is empty; ds_shape is the full shape.
        if name in weights and weights[name].shape != getattr(parameter, "ds_shape", parameter.shape):
            problem = name
    if problem:
        raise UsageError(f"adapter {file.parent} does not match its base model: check {problem}")
    for name, parameter in wanted.items():
        if name in weights:
            fill(parameter, weights[name])
