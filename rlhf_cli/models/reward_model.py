"""Check from configuration and tokenizer whether a model can read the policy's token IDs.

This covers reward models above all. The ranks of each role load the weights.
"""

import math
from dataclasses import dataclass, replace

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.classifiers import (
    is_classifier,
    is_token_classifier,
    refuse_classifier,
    refuse_several_labels,
    refuse_token_classes,
)
from rlhf_cli.models.cost import quadratic_cost
from rlhf_cli.models.finding import FoundModel, find_model
from rlhf_cli.models.tokenizers import load_tokenizer

TEACHER_FLAGS = ("teacher_pretrain", "teacher_by_source")
_OWN_TOKENS = "; to compare the texts instead, set --teacher_tokenizer own"
STEP_SEPARATOR = "step_separator"
"""Config key of a process reward model: the text between steps in its training data."""


@dataclass(frozen=True)
class ScoreStatistics:
    """Mean and std of reward-model scores on evaluation data."""

    mean: float
    std: float


@dataclass(frozen=True)
class RewardModelPlan:
    """A reward model that reads the policy's token IDs, before its weights are loaded.

    - `statistics`: for score normalization, if enabled.
    - `separator`: text that ends a step, if the model scores steps.
    - `last_separator`: separator tokens to insert after the last step, in place of the end token, if the model expects
      them.
    """

    source: ModelConfig
    found: FoundModel
    statistics: ScoreStatistics | None
    separator: str | None = None
    last_separator: tuple[int, ...] = ()

    @property
    def quadratic_cost(self) -> float:
        """Relative cost of the squared sequence length (see `quadratic_cost`)."""
        return quadratic_cost(self.found.architecture)


def find_reward_model(
    reward_pretrain: str, policy: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, normalize: bool
) -> RewardModelPlan:
    """Find the configured reward model, with the loading settings of the policy.

    Raises UsageError if it is not a model, does not have exactly one label, has a different vocabulary than the policy,
    or lacks the statistics for `normalize`.
    """
    plan, own_tokenizer = read_reward_model(_loaded_like(policy, reward_pretrain), normalize=normalize)
    require_same_tokens(own_tokenizer, tokenizer, f"--reward_pretrain {reward_pretrain!r}")
    return plan


def find_process_reward_model(
    prm_pretrain: str, policy: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> RewardModelPlan:
    """Find the configured process reward model, with the loading settings of the policy.

    Raises UsageError like `find_reward_model`, or if the configuration does not name the step separator.
    """
    setting = f"--prm_pretrain {prm_pretrain!r}"
    source = _loaded_like(policy, prm_pretrain)
    plan, own_tokenizer = read_reward_model(source, normalize=False, flag="--prm_pretrain", takes_classes=True)
    architecture = plan.found.architecture
    separator = getattr(architecture, STEP_SEPARATOR, None)
    if not isinstance(separator, str) or not separator:
        raise UsageError(f"{setting} {_why_no_separator(architecture)}")
    require_same_tokens(own_tokenizer, tokenizer, setting)
    # A token classifier is trained to predict at the separator, so the last step needs one too.
    last = own_tokenizer.encode(separator, add_special_tokens=False) if is_token_classifier(architecture) else []
    return replace(plan, separator=separator, last_separator=tuple(last))


def _why_no_separator(config: PretrainedConfig) -> str:
    if is_token_classifier(config):
        return f'does not name the text between steps: add {STEP_SEPARATOR} to config.json ("\\n" is the TRL default)'
    return f"scores full responses: config.json has no {STEP_SEPARATOR}, which `rlhf prm` writes"


def _loaded_like(policy: ModelConfig, pretrain: str) -> ModelConfig:
    """Copy the policy's loading settings for another model."""
    # The model is frozen and reads token IDs: it needs no chat template and no activation checkpoints.
    changes = {"pretrain": pretrain, "tokenizer_chat_template": None, "gradient_checkpointing": False}
    return policy.model_copy(update=changes)


def read_reward_model(
    source: ModelConfig, *, normalize: bool, flag: str = "--reward_pretrain", takes_classes: bool = False
) -> tuple[RewardModelPlan, PreTrainedTokenizerBase]:
    """Find a reward model and its tokenizer.

    `flag` appears in messages. `takes_classes` allows heads with two classes (wrong, right). Raises UsageError if it is
    not a model, does not have exactly one label, or lacks the statistics for `normalize`.
    """
    try:
        found, tokenizer = find_model(source), load_tokenizer(source)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from error
    if not (takes_classes and is_token_classifier(found.architecture)):
        _require_one_label(found.architecture, f"{flag} {source.pretrain!r}")
    statistics = _score_statistics(found.architecture, source.pretrain) if normalize else None
    return RewardModelPlan(source, found, statistics), tokenizer


def _score_statistics(config: PretrainedConfig, name: str) -> ScoreStatistics:
    """Return the score statistics stored in the configuration. Raises UsageError if they are missing or invalid."""
    mean, std = (getattr(config, f"reward_{what}", None) for what in ("mean", "std"))
    if mean is None or std is None:
        raise UsageError(
            f"--normalize_reward: the config.json of {name!r} has no reward_mean and reward_std; `rlhf rm` writes "
            "them if you pass --eval_dataset"
        )
    # A reward model with constant scores has std 0, and standardizing would divide by it.
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise UsageError(f"--normalize_reward: {name!r} has invalid statistics: reward_mean {mean}, reward_std {std}")
    return ScoreStatistics(float(mean), float(std))


def _require_one_label(config: PretrainedConfig, what: str) -> None:
    refuse_token_classes(config, what)
    if not is_classifier(config):
        kinds = " ".join(config.architectures or [])
        raise UsageError(
            f"{what} is {kinds or config.model_type}, not a sequence-classification model with one label: `rlhf rm` "
            "trains one for responses, `rlhf prm` one for steps"
        )
    refuse_several_labels(config, what)


def find_reader(flag: str, source: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> FoundModel:
    """Find a language model that reads token IDs from this tokenizer.

    Raises:
        UsageError: the model cannot be found, is a classifier, or has a different vocabulary.
    """
    found, own_tokenizer = find_language_model(flag, source)
    way_out = _OWN_TOKENS if flag in TEACHER_FLAGS else ""
    require_same_tokens(own_tokenizer, tokenizer, f"--{flag} {source.pretrain!r}", way_out=way_out)
    return found


def find_language_model(flag: str, source: ModelConfig) -> tuple[FoundModel, PreTrainedTokenizerBase]:
    """Find a language model and its tokenizer. Raises UsageError if it cannot be found, or is a classifier."""
    try:
        found, tokenizer = find_model(source), load_tokenizer(source)
    except UsageError as error:
        raise UsageError(f"--{flag}: {error}") from error
    refuse_classifier(found.architecture, f"--{flag} {source.pretrain!r}")
    return found, tokenizer


def require_same_tokens(
    own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, what: str, *, way_out: str = ""
) -> None:
    """Raise UsageError if a model maps tokens to different IDs than the policy. `way_out` ends the message.

    Policy token IDs are passed to it unchanged. Additional tokens in its vocabulary are allowed.
    """
    own_ids = own.get_vocab()
    mismatched = sorted((number, token) for token, number in policy.get_vocab().items() if own_ids.get(token) != number)
    if mismatched:
        number, token = mismatched[0]
        there = f"{own_ids[token]} there" if token in own_ids else "not there"
        raise UsageError(
            f"{what} has a different vocabulary than the policy and would misread its token IDs: "
            f"{len(mismatched):,} of {len(policy):,} tokens differ, first {token!r}: {number} here, {there}{way_out}"
        )
