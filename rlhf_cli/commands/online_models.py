"""The models of an online command, found and held against each other before any weight is read."""

from dataclasses import dataclass

from rlhf_cli.algorithms.table import Algorithm
from rlhf_cli.commands.offline import TrainedModel, trained_model
from rlhf_cli.commands.online_config import CriticConfig, OnlineConfig
from rlhf_cli.commands.run_directory import check_not_replaced
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import require_language_model
from rlhf_cli.models.classifiers import refuse_several_labels
from rlhf_cli.models.loading import check_trainable
from rlhf_cli.models.reward_model import RewardModel, find_reward_model, require_same_tokens


@dataclass(frozen=True)
class OnlineModels:
    """What the roles start from; a critic and a reward model where the run has them."""

    policy: TrainedModel
    critic: TrainedModel | None
    reward: RewardModel | None


def find_models(config: OnlineConfig, algorithm: Algorithm) -> OnlineModels:
    """The models of the settings. UsageError where one is not what its role needs, or reads other token ids."""
    policy = trained_model(config.model, config.adapter, seed=config.batch.seed)
    require_language_model(config.model, policy.architecture, policy.plan)
    check_trainable(policy.architecture)
    if policy.plan is not None and config.reference.ref_sync_steps:
        raise UsageError("ref_sync_steps moves a whole model; under an adapter the reference is the base, which stays")
    reward = None
    if config.reward.reward_pretrain is not None:
        reward = find_reward_model(
            config.reward.reward_pretrain, policy.base, policy.tokenizer, normalize=config.reward.normalize_reward
        )
    critic = _critic(config, policy) if algorithm.critic else None
    trained = (policy, critic or policy)
    names = {name for model in trained for name in (model.source.pretrain, model.base.pretrain)}
    check_not_replaced(config.checkpoint, *sorted(names), *([reward.source.pretrain] if reward else []))
    return OnlineModels(policy, critic, reward)


def _critic(config: OnlineConfig, policy: TrainedModel) -> TrainedModel:
    """The policy's own model, or the one of `critic_pretrain`, under an adapter of its own where there are adapters."""
    assert isinstance(config, CriticConfig)
    pretrain = config.critic.critic_pretrain
    if pretrain is None:
        return policy
    source = config.model.model_copy(update={"pretrain": pretrain, "tokenizer_chat_template": None})
    try:
        critic = trained_model(source, config.adapter, seed=config.batch.seed)
        check_trainable(critic.architecture)
    except UsageError as error:
        raise UsageError(f"--critic_pretrain: {error}") from error
    what = f"--critic_pretrain {pretrain!r}"
    refuse_several_labels(critic.architecture, what)
    require_same_tokens(critic.tokenizer, policy.tokenizer, what)
    return critic
