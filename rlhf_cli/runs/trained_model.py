"""Language models of a training command, with an optional adapter, before weights are loaded."""

import functools
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import AdapterPlan, check_layer_names, plan_adapter
from rlhf_cli.models.finding import FoundModel, find_model
from rlhf_cli.models.mixers.layers import Layers, layers_of
from rlhf_cli.models.requirements import check_trainable, packed_attention
from rlhf_cli.models.reward_model import find_language_model, find_reader
from rlhf_cli.models.tokenizers import load_tokenizer


@dataclass(frozen=True)
class ModelPlan:
    """A language model, with an optional adapter, before weights are loaded.

    - `source`: model settings, which may refer to an adapter.
    - `base`: settings for the model, or for the adapter's base model.
    - `found`: path and configuration of `base`.
    """

    source: ModelConfig
    base: ModelConfig
    plan: AdapterPlan | None
    found: FoundModel
    tokenizer: Any

    @property
    def architecture(self) -> PretrainedConfig:
        """Hugging Face configuration of `base`."""
        return self.found.architecture

    @property
    def attention(self) -> str:
        """Name of the attention kernel for training."""
        return packed_attention(self.base, self.architecture)

    @functools.cached_property
    def layers(self) -> Layers:
        """Layers of `base` that mix tokens."""
        return layers_of(self.architecture, trust_remote_code=self.base.trust_remote_code)


def trained_model(model: ModelConfig, adapter: LoraConfig, *, seed: int) -> ModelPlan:
    """Find the model for these settings. Raises UsageError if it is invalid, or does not match the adapter."""
    plan = plan_adapter(model, adapter, seed=seed)
    base = model if plan is None else model.model_copy(update={"pretrain": plan.base})
    found = find_model(base)
    if plan is not None:
        check_layer_names(plan, found.architecture, trust_remote_code=model.trust_remote_code)
    return ModelPlan(model, base, plan, found, load_tokenizer(model))


def reference_notice(model: ModelPlan) -> list[str]:
    """Return a notice if training starts from an adapter, because the reference is the base model without it."""
    if model.plan is None or model.plan.weights is None:
        return []
    adapter = model.plan.weights.parent
    return [
        f"the reference is {model.plan.base} without the initial adapter; to include the adapter, merge it "
        f"(rlhf merge --model {adapter} --output MERGED) and set --pretrain MERGED --lora_rank {model.plan.config.r}"
    ]


def find_companion(flag: str, source: ModelConfig, trained: ModelPlan) -> FoundModel:
    """Find a second language model that reads the same tokens as the trained model.

    Raises:
        UsageError: `find_reader` fails, or the vocabulary of the model is too small.
    """
    found = find_reader(flag, source, trained.tokenizer)
    last_token = max(trained.tokenizer.get_vocab().values())
    sizes = [config.get_text_config().vocab_size for config in (found.architecture, trained.architecture)]
    # Padding rows beyond the tokenizer's tokens may differ.
    if sizes[0] < min(last_token + 1, sizes[1]):
        what = f"--{flag} {source.pretrain!r}"
        raise UsageError(f"{what} has {sizes[0]:,} embeddings, but the tokenizer has {last_token + 1:,} tokens")
    return found


def find_frozen_policy(
    flag: str,
    pretrain: str,
    policy: ModelConfig,
    architecture: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    own_tokenizer: bool = False,
) -> ModelPlan:
    """Find a frozen language model, such as a teacher, with the loading settings of the policy.

    Args:
        flag: setting that names the model, for messages.
        pretrain: its value.
        architecture: policy configuration.
        tokenizer: policy tokenizer.
        own_tokenizer: whether the model reads its own tokens instead of the policy's.

    Raises UsageError if it is not a complete language model, does not support packs or has a different vocabulary than
    the policy.
    """
    changes = {"pretrain": pretrain, "tokenizer_chat_template": None, "gradient_checkpointing": False}
    source = policy.model_copy(update=changes)
    if own_tokenizer:
        found, tokenizer = find_language_model(flag, source)
    else:
        found = find_reader(flag, source, tokenizer)
    try:
        # The model is never trained, but it reads the same packs.
        check_trainable(found.architecture, trust_remote_code=source.trust_remote_code)
    except UsageError as error:
        raise UsageError(f"--{flag}: {error}") from error
    if not own_tokenizer:
        _require_all_embeddings(found.architecture, architecture, f"--{flag} {pretrain!r}")
    return ModelPlan(source, source, None, found, tokenizer)


def _require_all_embeddings(frozen: PretrainedConfig, policy: PretrainedConfig, what: str) -> None:
    """Raise UsageError if the policy could sample a token without an embedding in the frozen model."""
    # Compare embedding rows, not vocabularies: the policy may sample padding rows beyond the tokenizer's vocabulary.
    own, sampled = (config.get_text_config().vocab_size for config in (frozen, policy))
    if own < sampled:
        raise UsageError(
            f"{what} has {own:,} embeddings and the policy {sampled:,}: it cannot read every token that the policy may "
            "sample"
        )
