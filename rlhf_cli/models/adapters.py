"""Adapters (LoRA, by PEFT) on models that stay frozen under them: put on, switched off, saved and loaded.

The layers go into the Hugging Face model itself, so whatever takes that takes it with an adapter too. A `score` head is
trained and saved whole. merging.py folds an adapter into its base.
"""

import contextlib
import copy
import hashlib
import json
import math
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
from rlhf_cli.models.loading import fill, language_model_class, num_parameters
from rlhf_cli.models.saving import config_to_save, save_tokenizer
from rlhf_cli.models.tensor_parallel import whole_shape
from rlhf_cli.models.vision.adapting import language_targets
from rlhf_cli.models.vision.families.table import takes_pictures
from rlhf_cli.models.vision.freezing import freeze_parts
from rlhf_cli.models.weight_files import SafetensorsFiles, fingerprint, fingerprint_of, folder_of

WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FILE = "adapter_base.json"
"""Facts that are not in PEFT's own file: the fingerprint of the base."""
MODEL_FILE = "model_config.json"
"""Configuration of base and adapter together; named config.json, it would make transformers see a whole model."""
HEAD = "score"
SCORES = "SEQ_CLS"
"""PEFT's task type of adapters on a model with a head."""
PREFIX = "base_model.model."
"""Before every name in PEFT's files: there the model sits in two wrappers."""
MAGNITUDE = "lora_magnitude_vector"
"""DoRA's lengths of rows, which PEFT's files name without `.weight`."""
ACTIVE = "default"
"""PEFT's name for the one adapter there is; a part of names in memory, not in files."""


VARIANTS = ("use_rslora", "use_dora", "exclude_modules", "rank_pattern", "alpha_pattern")
"""Settings of an adapter that most adapters do not have."""
OF_NEW_ADAPTERS = (
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "target_modules",
    "exclude_modules",
    "lora_vision_tower",
)
"""Settings that an adapter on disk has of its own."""


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter to be trained: new, or one that is on disk."""

    base: str  # folder or Hub name
    fingerprint: str  # of the base
    config: Any  # PEFT's LoraConfig
    weights: Path | None  # to start from
    in_4bit: bool
    seed: int
    with_tower: bool = False  # a new adapter of a vision-language model is not on its language part alone

    def identity(self) -> dict[str, object]:
        """Return the settings that have to be equal for a checkpoint of it to be continued."""
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
        """Return a hash of the base and, if there is one to start from, of the adapter on disk."""
        if self.weights is None:
            return self.fingerprint
        _require_weights(self.weights)
        own = fingerprint_of(SafetensorsFiles([self.weights]))
        return hashlib.sha256(f"{self.fingerprint} {own}".encode()).hexdigest()[:32]


def sorted_names(setting: Any) -> Any:
    """Return names of layers in a fixed order; PEFT keeps them as a set, or has a pattern instead."""
    return sorted(setting) if isinstance(setting, set | list) else setting


def plan_adapter(model: ModelConfig, adapter: LoraConfig, *, seed: int) -> AdapterPlan | None:
    """Return the model that the settings request: a new adapter, the one at `pretrain`, or None.

    Raises:
        UsageError: the adapter at `pretrain` has another rank than requested, or its base has changed; settings
            of an adapter are given and there is none.
    """
    folder = adapter_folder(model.pretrain)
    in_4bit = adapter.load_in_4bit
    if folder is None and adapter.lora_rank == 0:
        if in_4bit:
            raise UsageError("load_in_4bit: weights in 4 bits cannot be trained themselves; give --lora_rank")
        if given := adapter.changed("lora_dropout", *OF_NEW_ADAPTERS):
            raise UsageError(f"{given} is about an adapter: give --lora_rank")
        return None
    config = _new_config(adapter) if folder is None else _stored_config(folder, adapter)
    base = resolve_model_path(model.pretrain) if folder is None else base_of(folder, config)
    if Path(base).is_dir():
        base = str(Path(base).resolve())  # a saved adapter is looked at from other places
    config.base_model_name_or_path = base
    if folder is not None:
        require_whole_precision(folder, folder_of(base))
    mark = fingerprint(folder_of(base))
    if folder is not None:
        require_same_base(folder, base, mark)
    weights = None if folder is None else folder / WEIGHTS_FILE
    return AdapterPlan(base, mark, config, weights, in_4bit, seed, adapter.lora_vision_tower)


def require_language_model(model: ModelConfig, architecture: PretrainedConfig, plan: AdapterPlan | None) -> None:
    """Raise UsageError if the model of the settings, or its adapter, gives scores."""
    what = f"--pretrain {model.pretrain!r}"
    refuse_classifier(architecture, what)
    if plan is not None and plan.config.task_type == SCORES:
        raise UsageError(f"{what} is the adapter of a reward model, which gives scores: give a language model")


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
            f"pretrain {str(folder)!r} is an adapter of rank {config.r}, not {adapter.lora_rank}: leave --lora_rank "
            "away to train it further, or fold it into its base with `rlhf merge` to begin another"
        )
    if given := adapter.changed(*OF_NEW_ADAPTERS):
        raise UsageError(f"pretrain {str(folder)!r} is an adapter that has its own {given}: leave --{given} away")
    if others := set(config.modules_to_save or ()) - {HEAD}:
        raise UsageError(
            f"pretrain {str(folder)!r}: an adapter that trains whole layers ({', '.join(sorted(others))}) is not "
            "trained further; `rlhf merge` makes a model of it, to begin another adapter on"
        )
    config.inference_mode, config.modules_to_save = False, None
    config.lora_dropout = adapter.lora_dropout
    return config


def read_config(folder: Path) -> Any:
    """Return PEFT's configuration of the adapter in a folder. Raise UsageError unless it is a LoRA."""
    import peft

    config = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, peft.LoraConfig):
        raise UsageError(f"adapter {folder} is a {config.peft_type.value}: only LoRA is known here")
    require_known_parts(folder, config)
    return config


def base_of(folder: Path, config: Any) -> str:
    """Return the path or Hub name of the model under the adapter. UsageError if it is gone."""
    base = config.base_model_name_or_path
    if not base:
        raise UsageError(f"adapter {folder} does not name its model (base_model_name_or_path)")
    try:
        return resolve_model_path(base)
    except UsageError as error:
        raise UsageError(f"adapter {folder}: the model it belongs to cannot be found: {error}") from error


def require_same_base(folder: Path, base: str, mark: str) -> None:
    """Raise UsageError if the adapter in the folder was trained on weights with another fingerprint."""
    file = folder / BASE_FILE
    if file.is_file() and (written := json.loads(file.read_text())["fingerprint"]) != mark:
        raise UsageError(
            f"adapter {folder} belongs to another model: the weights at {base} are not those it was trained on "
            f"(fingerprint {mark}, not {written})"
        )


def load_with_adapter(
    load: Callable[..., PreTrainedModel],
    model: ModelConfig,
    plan: AdapterPlan | None,
    *,
    device: torch.device | None = None,
    partition: AbstractContextManager[None] | None = None,
) -> PreTrainedModel:
    """Return the model by `load` (`load_causal_lm`, `load_value_backbone`) as it is trained: under the adapter if one
    is planned, else with the parts frozen that the settings name.
    """
    if plan is None:
        hf_model = load(model, device=device, partition=partition)
        freeze_parts(hf_model, model)
        return hf_model
    base = model.model_copy(update={"pretrain": plan.base})
    hf_model = load(base, device=device, partition=partition, in_4bit=plan.in_4bit)
    put_adapter(hf_model, plan)
    return hf_model


def put_adapter(model: PreTrainedModel, plan: AdapterPlan) -> None:
    """Put the adapter on the model and freeze everything else but a `score` head.

    A new adapter changes nothing yet: one of its two factors is zero. Its weights have the model's type; DeepSpeed
    keeps float32 copies of trained weights.
    """
    from peft import inject_adapter_in_model

    config = copy.deepcopy(plan.config)
    config.task_type = SCORES if _has_head(model) else "CAUSAL_LM"
    if takes_pictures(model.config) and plan.weights is None and not plan.with_tower:
        config.target_modules = language_targets(model, config.target_modules)
    if plan.weights is None:  # the file of one on disk may name layers of other models
        _require_layers(model, config)
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)  # the same weights however the model was loaded
        try:
            inject_adapter_in_model(config, model, adapter_name=ACTIVE)
        except ValueError as error:
            raise UsageError(f"{_naming_setting(config)}: {first_line(error)}") from error
    _require_linear_layers(model)
    config.target_modules = _short_names(model)
    if _has_head(model):
        model.score.requires_grad_(True)
    if plan.weights is not None:
        _load_weights(model, plan.weights)
    model.adapter_fingerprint = plan.fingerprint


def _naming_setting(config: Any) -> str:
    return "target_modules, exclude_modules" if config.exclude_modules else "target_modules"


def check_layer_names(plan: AdapterPlan, architecture: PretrainedConfig, *, trust_remote_code: bool) -> None:
    """Raise UsageError if a new adapter names a layer that the model does not have, before any weight is read."""
    if plan.weights is None and (isinstance(plan.config.target_modules, set) or plan.config.exclude_modules):
        with torch.device("meta"):
            model = language_model_class(architecture).from_config(architecture, trust_remote_code=trust_remote_code)
        _require_layers(model, plan.config)


def _require_layers(model: nn.Module, config: Any) -> None:
    """Raise UsageError if a list of layers has a name that no layer has; PEFT may have a pattern instead."""
    names = [f".{name}" for name, _ in model.named_modules()]
    for setting in ("target_modules", "exclude_modules"):
        listed = getattr(config, setting)
        for wanted in sorted(listed) if isinstance(listed, list | set | tuple) else ():
            if not any(name.endswith(f".{wanted}") for name in names):
                linear = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if type(part) is nn.Linear}
                raise UsageError(f"{setting}: no layer has the name {wanted}; there are {', '.join(sorted(linear))}")


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
                f"target_modules: {name} cannot have an adapter, only linear layers below the head can: "
                "name them, as in --target_modules q_proj,v_proj"
            )


def _short_names(model: nn.Module) -> list[str]:
    """Return the last parts of the names of layers with an adapter, or whole names where other layers end alike."""
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
    """Within the block the model, or any module around it, computes what its base does.

    For use without gradients. PEFT's own switch also changes which parameters take gradients, whose hooks DeepSpeed
    has set up by then.
    """
    layers = list(_tuned(model).values())
    assert layers, "there is no adapter to switch off"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def scales(model: nn.Module) -> dict[str, float]:
    """Return the scale of the product of the two factors, by the name of their layer."""
    return {name: float(layer.scaling[ACTIVE]) for name, layer in _tuned(model).items()}


def parameter_counts(model: nn.Module) -> str:
    """Return for the terminal how many parameters there are and, if not all, how many are trained."""
    trained = sum(math.prod(whole_shape(p)) for p in model.parameters() if p.requires_grad)
    total = num_parameters(model)
    counts = f"{total / 1e6:.1f}M parameters"
    return counts if trained == total else f"{counts}, {trained / 1e6:.3g}M of them trained"


def file_name(name: str) -> str:
    """Return the name in PEFT's files of a parameter of the model."""
    in_file = PREFIX + name.replace(f".{ACTIVE}.", ".")
    return in_file.removesuffix(".weight") if in_file.endswith(f"{MAGNITUDE}.weight") else in_file


def weights_read_by_others(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """Return pairs (module, parameter of another module that it reads), for ZeRO-3 to gather in time.

    DoRA's module reads the weight of the layer under it, and the shape of the first factor.
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
    """Write the adapter, whose whole trained weights are given, as a folder that PEFT loads; whole or not at all."""
    with whole_folder(path) as written:
        weights = {file_name(name): weight.contiguous() for name, weight in state_dict.items()}
        save_file(weights, written / WEIGHTS_FILE, metadata={"format": "pt"})
        describe_adapter(model, written)
        tokenizer = set_padding(model, tokenizer)
        config_to_save(model).to_json_file(written / MODEL_FILE)
        save_tokenizer(model, tokenizer, written)


def describe_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write PEFT's configuration of the adapter, and the fingerprint of its base."""
    config = copy.deepcopy(model.peft_config[ACTIVE])
    config.inference_mode = True
    config.modules_to_save = [HEAD] if _has_head(model) else None
    config.save_pretrained(str(folder))
    (folder / BASE_FILE).write_text(json.dumps({"fingerprint": model.adapter_fingerprint}) + "\n")


def _require_weights(file: Path) -> None:
    if not file.is_file():
        raise UsageError(f"adapter {file.parent} has an {ADAPTER_FILE} but no {file.name}")


def _load_weights(model: PreTrainedModel, file: Path) -> None:
    _require_weights(file)
    weights = load_file(file)
    wanted = {file_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    missing = {name for name in wanted if name not in weights and not name.endswith(f"{HEAD}.weight")}
    problem = min(missing | (weights.keys() - wanted.keys()), default="")
    for name, parameter in wanted.items():
        if name in weights and weights[name].shape != getattr(parameter, "ds_shape", parameter.shape):
            problem = name
    if problem:
        raise UsageError(f"adapter {file.parent} does not fit the model it names: look at {problem}")
    for name, parameter in wanted.items():
        if name in weights:  # a head that the adapter does not have is new
            fill(parameter, weights[name])
