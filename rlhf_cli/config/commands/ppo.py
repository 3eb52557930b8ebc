"""The settings of `rlhf ppo`."""

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.config.commands.online import NEVER_ONLINE, OnlineConfig


class PPOConfig(OnlineConfig):
    """Settings of `rlhf ppo`."""

    unsupported = NEVER_ONLINE
    compares_rewards = "a critic values rewards"

    policy: ActorCriticPolicyConfig = ActorCriticPolicyConfig()
