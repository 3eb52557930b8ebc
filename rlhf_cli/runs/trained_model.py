"""The model that a training command names, perhaps under an adapter, before its weights are loaded."""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import AdapterPlan, check_layer_names, plan_adapter
from rlhf_cli.models.finding import FoundModel, find_model
from rlhf_cli.models.requirements import packed_attention
from rlhf_cli.models.reward_model import find_reader
from rlhf_cli.models.tokenizers import load_tokenizer


@dataclass(frozen=True)
class TrainedModel:
    """The model that the settings name, perhaps under an adapter, before its weights are loaded.

    `base` is the named model, or the model under the named adapter; `found` has its path and configuration.
    """

    source: ModelConfig
    base: ModelConfig
    plan: AdapterPlan | None
    found: FoundModel
    tokenizer: Any

    @property
    def architecture(self) -> PretrainedConfig:
        """The Hugging Face configuration of `base`."""
        return self.found.architecture

    @property
    def attention(self) -> str:
        """Name of the attention kernel it is going to run with."""
        return packed_attention(self.base, self.architecture)


def trained_model(model: ModelConfig, adapter: LoraConfig, *, seed: int) -> TrainedModel:
    """Return the model of the settings. Raise UsageError if it is no model, or its adapter does not fit it."""
    plan = plan_adapter(model, adapter, seed=seed)
    base = model if plan is None else model.model_copy(update={"pretrain": plan.base})
    found = find_model(base)
    if plan is not None:
        check_layer_names(plan, found.architecture, trust_remote_code=model.trust_remote_code)
    return TrainedModel(model, base, plan, found, load_tokenizer(model))


def reference_notice(model: TrainedModel) -> list[str]:
    """Return a line if training starts from an adapter, which the reference, its base, does not have."""
    if model.plan is None or model.plan.weights is None:
        return []
    adapter = model.plan.weights.parent
    return [
        f"the reference is {model.plan.base} without the adapter that training starts from; to compare with both, "
        f"make one model of them (rlhf merge --model {adapter} --output MERGED) and give --pretrain MERGED --lora_rank "
        f"{model.plan.config.r}"
    ]


def find_companion(flag: str, source: ModelConfig, trained: TrainedModel) -> FoundModel:
    """Return a language model that reads the data that the trained model is trained on.

    Raises:
        UsageError: as `find_reader`, or the model has too few embeddings.
    """
    found = find_reader(flag, source, trained.tokenizer)
    last_token = max(trained.tokenizer.get_vocab().values())
    sizes = [config.get_text_config().vocab_size for config in (found.architecture, trained.architecture)]
    if sizes[0] < min(last_token + 1, sizes[1]):  # rows of padding beyond the tokens may differ
        what = f"--{flag} {source.pretrain!r}"
        raise UsageError(f"{what} has {sizes[0]:,} embeddings, fewer than the {last_token + 1:,} tokens it would read")
    return found
