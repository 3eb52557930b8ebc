"""Groups the models of `rlhf eval` by engines: neighboring adapters on the same base share engines.

All other models are loaded in full by separate engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rlhf_cli.backends.cluster.ray_cluster import Cluster
from rlhf_cli.backends.rollout.engine import eos_token_ids
from rlhf_cli.backends.weight_sync.adapter_push import (
    VLLM_RANKS,
    adapter_manifest,
    highest_rank,
    vllm_config,
    vllm_rank,
)
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import read_config
from rlhf_cli.models.merging import FACTORS
from rlhf_cli.models.weight_files import folder_of
from rlhf_cli.runs.inference.run import ModelUnderTest
from rlhf_cli.runs.model_export import GENERATION, Parts, adapter_weights

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Dense architectures with vLLM adapter support and the layer names below."""
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelGroup:
    """Models evaluated on the same engines. `first` is the index of the first one.

    `base` is the model that engines load before adding adapters; None to load a single model in full.
    """

    first: int
    models: list[ModelUnderTest]
    base: Path | None = None

    @property
    def numbers(self) -> range:
        """Indices of the models in the full list."""
        return range(self.first, self.first + len(self.models))

    @property
    def max_lora_rank(self) -> int:
        """LoRA rank for which engines reserve memory."""
        adapters = (_parts(tested) for tested in self.models if tested.model.parts is not None)
        return vllm_rank(*(vllm_config(read_config(parts.description)) for parts in adapters))


def grouped_models(models: Sequence[ModelUnderTest], *, cluster: Cluster) -> list[ModelGroup]:
    """Group all models in order. Neighbors with the same base share engines if at least one is an adapter.

    Depends on all models, including completed ones, so that a resumed run groups them the same way.
    """
    # Group only neighbors, because responses are written in the order of the models.
    groups: list[ModelGroup] = []
    numbered = [(number, tested, _shared_base(tested, cluster=cluster)) for number, tested in enumerate(models)]
    for base, found in groupby(numbered, key=lambda entry: entry[2]):
        neighbors = list(found)
        tested = [entry[1] for entry in neighbors]
        if base is not None and len(tested) > 1 and any(one.model.parts is not None for one in tested):
            groups.append(ModelGroup(neighbors[0][0], tested, base))
        else:
            groups += [ModelGroup(number, [one]) for number, one, _ in neighbors]
    return groups


def describe_groups(groups: Sequence[ModelGroup], *, cluster: Cluster) -> str:
    """Describe which models share engines, and why other adapters do not."""
    lines = []
    for group in groups:
        names = ", ".join(_name(tested) for tested in group.models)
        if group.base is not None:
            lines.append(f"engines load {group.base} once for {names}")
        elif (parts := group.models[0].model.parts) is not None and parts.base is not None:
            reason = why_whole(group.models[0], cluster=cluster) or "no neighbor has the same base"
            lines.append(f"{names} is merged ({reason})")
    return "; ".join(lines)


def manifest_of(tested: ModelUnderTest, *, version: int) -> dict[str, object]:
    """Return the adapter push for engines with its base; without tensors for the base itself."""
    if tested.model.parts is None:
        return adapter_manifest([], {}, version=version)
    parts = tested.model.parts
    weights = adapter_weights(parts, tested.model.architecture)
    tensors = ((name, weights.read(name)) for name in weights.names())
    return adapter_manifest(tensors, vllm_config(read_config(parts.description)), version=version)


def _shared_base(tested: ModelUnderTest, *, cluster: Cluster) -> Path | None:
    """Return the base model's folder, or the model's own; None if it must be loaded in full."""
    parts = tested.model.parts
    if parts is None:
        return folder_of(tested.model.found.path).resolve()
    if parts.base is None or why_whole(tested, cluster=cluster) is not None:
        return None
    return parts.base.resolve()


def why_whole(tested: ModelUnderTest, *, cluster: Cluster) -> str | None:
    """Return why the adapter must be merged; None if vLLM can apply it with the same results."""
    return _fault_of_settings(tested, cluster=cluster) or _fault_of_adapter(tested)


def _fault_of_settings(tested: ModelUnderTest, *, cluster: Cluster) -> str | None:
    config = tested.config
    if tested.backend != "vllm":
        return "only vLLM applies adapters"
    if len(cluster.node_gpus) > 1:
        return "other machines may not have the base model"
    if cluster.has_gpus and config.model.param_dtype == "fp32":
        return "on a GPU vLLM requires 16-bit weights for adapters"
    if config.engine.engine_arguments:
        return "--vllm_args may change the base model"
    if config.sampling.stop:
        return "--stop requires the adapter's tokenizer"
    return None


def _fault_of_adapter(tested: ModelUnderTest) -> str | None:
    parts, architecture = _parts(tested), tested.model.architecture
    config = read_config(parts.description)
    if not set(architecture.architectures or [""]) <= set(ARCHITECTURES):
        return f"{architecture.model_type} models are loaded in full"
    if config.use_dora:
        return "vLLM does not support DoRA"
    if config.modules_to_save:
        return "it has modules_to_save"
    if config.fan_in_fan_out:
        return "it uses fan_in_fan_out"
    if highest_rank(vllm_config(config)) > VLLM_RANKS[-1]:
        return f"vLLM supports ranks up to {VLLM_RANKS[-1]}"
    if strange := _strange_names(adapter_weights(parts, architecture).names()):
        return f"vLLM does not support adapters for {strange[0]}"
    return None if _ends_like_base(tested) else "its end tokens differ"


def _strange_names(names: list[str]) -> list[str]:
    """Return tensors that are not adapter factors of layers supported by vLLM."""
    known = tuple(f".{layer}{factor}.weight" for layer in _LAYERS for factor in FACTORS)
    return [name for name in names if not name.endswith(known)]


def _ends_like_base(tested: ModelUnderTest) -> bool:
    """Return whether the merged model and its base stop responses at the same tokens."""
    parts = _parts(tested)
    assert parts.base is not None, "a checkpoint without an adapter"
    found = tested.model.architecture.eos_token_id
    try:
        if (folder := parts.file((GENERATION,))) is not None:
            own = set(eos_token_ids(folder))
        else:
            own = {found} if isinstance(found, int) else set(found or ())
        return own | set(tested.data.end_ids) == {*eos_token_ids(parts.base), *tested.data.end_ids}
    except UsageError:  # a file defines no end token
        return False


def _parts(tested: ModelUnderTest) -> Parts:
    assert tested.model.parts is not None, "a model without an adapter"
    return tested.model.parts


def _name(tested: ModelUnderTest) -> str:
    return str(tested.config.model.pretrain)
