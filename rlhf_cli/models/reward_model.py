"""Whether a model that reads the policy's token ids fits it, seen from configuration and tokenizer alone.

A reward model above all, of whose weights nothing is here: the ranks of its role load them.
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

STEP_SEPARATOR = "step_separator"
"""Entry of a process reward model's configuration: the text between the steps that it was trained on."""


@dataclass(frozen=True)
class ScoreStatistics:
    """Mean and spread of a reward model's scores on the data it was evaluated on."""

    mean: float
    std: float


@dataclass(frozen=True)
class RewardModelPlan:
    """A reward model that reads the policy's token ids, before its weights are loaded.

    `statistics` are there where its scores are to be normalised; `separator` if it scores steps, which this text ends.
    `last_separator` are the separator's tokens if the model reads them behind the last step too, in place of the end.
    """

    source: ModelConfig
    found: FoundModel
    statistics: ScoreStatistics | None
    separator: str | None = None
    last_separator: tuple[int, ...] = ()

    @property
    def quadratic_cost(self) -> float:
        """The cost of a sequence's squared length beside its length (`quadratic_cost`)."""
        return quadratic_cost(self.found.architecture)


def find_reward_model(
    reward_pretrain: str, policy: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, normalize: bool
) -> RewardModelPlan:
    """Return the reward model of the settings, loaded the way the policy is.

    Raises UsageError if it is no model, has not one label, reads other token ids than the policy's tokenizer gives, or
    lacks the statistics for `normalize`.
    """
    found, own_tokenizer = read_reward_model(_loaded_like(policy, reward_pretrain), normalize=normalize)
    require_same_tokens(own_tokenizer, tokenizer, f"--reward_pretrain {reward_pretrain!r}")
    return found


def find_process_reward_model(
    prm_pretrain: str, policy: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> RewardModelPlan:
    """Return the process reward model of the settings, loaded the way the policy is.

    Raises UsageError as `find_reward_model`, or if its configuration does not name the separator of steps.
    """
    setting = f"--prm_pretrain {prm_pretrain!r}"
    source = _loaded_like(policy, prm_pretrain)
    found, own_tokenizer = read_reward_model(source, normalize=False, flag="--prm_pretrain", takes_classes=True)
    architecture = found.found.architecture
    separator = getattr(architecture, STEP_SEPARATOR, None)
    if not isinstance(separator, str) or not separator:
        raise UsageError(f"{setting} {_why_no_separator(architecture)}")
    require_same_tokens(own_tokenizer, tokenizer, setting)
    last = own_tokenizer.encode(separator, add_special_tokens=False) if is_token_classifier(architecture) else []
    return replace(found, separator=separator, last_separator=tuple(last))


def _why_no_separator(config: PretrainedConfig) -> str:
    if is_token_classifier(config):
        return (
            f"does not name the text between its steps: add {STEP_SEPARATOR} to its config.json, "
            '"\\n" if TRL trained it with its default'
        )
    return f"scores whole responses: its configuration has no {STEP_SEPARATOR}, which `rlhf prm` writes"


def _loaded_like(policy: ModelConfig, pretrain: str) -> ModelConfig:
    """Return the settings of another model that is loaded the way the policy is."""
    changes = {"pretrain": pretrain, "tokenizer_chat_template": None, "gradient_checkpointing": False}
    return policy.model_copy(update=changes)


def read_reward_model(
    source: ModelConfig, *, normalize: bool, flag: str = "--reward_pretrain", takes_classes: bool = False
) -> tuple[RewardModelPlan, PreTrainedTokenizerBase]:
    """Return a reward model and its tokenizer; messages name it by `flag`. `takes_classes` also takes heads with the
    classes wrong and right.

    Raises UsageError if it is no model, has not one label, or has no statistics and `normalize` asks for them.
    """
    try:
        found, tokenizer = find_model(source), load_tokenizer(source)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from error
    if not (takes_classes and is_token_classifier(found.architecture)):
        _require_one_label(found.architecture, f"{flag} {source.pretrain!r}")
    statistics = score_statistics(found.architecture, source.pretrain) if normalize else None
    return RewardModelPlan(source, found, statistics), tokenizer


def score_statistics(config: PretrainedConfig, name: str) -> ScoreStatistics:
    """Return the configuration's entry on the model's scores. Raises UsageError if it cannot be used."""
    mean, std = (getattr(config, f"reward_{what}", None) for what in ("mean", "std"))
    if mean is None or std is None:
        raise UsageError(
            f"--normalize_reward: the configuration of {name!r} has no reward_mean and reward_std; `rlhf rm` writes "
            "them where it has an --eval_dataset"
        )
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise UsageError(f"--normalize_reward: {name!r} has a reward_mean of {mean} and a reward_std of {std}")
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
    """Return a language model that gets token ids of this tokenizer.

    Raises:
        UsageError: the model of this flag cannot be found, is a classifier, or reads other token ids.
    """
    what = f"--{flag} {source.pretrain!r}"
    try:
        found, own_tokenizer = find_model(source), load_tokenizer(source)
    except UsageError as error:
        raise UsageError(f"--{flag}: {error}") from error
    refuse_classifier(found.architecture, what)
    require_same_tokens(own_tokenizer, tokenizer, what)
    return found


def require_same_tokens(own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, what: str) -> None:
    """Raise UsageError naming a model that reads other ids; the policy's go to it as they are.

    Tokens that only it has do no harm.
    """
    own_ids = own.get_vocab()
    others = sorted((number, token) for token, number in policy.get_vocab().items() if own_ids.get(token) != number)
    if others:
        number, token = others[0]
        there = f"{own_ids[token]} there" if token in own_ids else "not there"
        raise UsageError(
            f"{what} has another vocabulary than the policy, whose token ids it would read: "
            f"{len(others):,} of {len(policy):,} tokens differ, the first is {token!r}: {number} here, {there}"
        )
