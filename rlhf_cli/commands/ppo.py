"""`rlhf ppo`: online reinforcement learning with a critic."""

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.commands.online import NEVER_ONLINE, OnlineConfig


class PPOConfig(OnlineConfig):
    """Train a policy and a critic online on sampled, scored responses (PPO with GAE)."""

    command = "ppo"

    unsupported = NEVER_ONLINE
    needs_reward = "the critic predicts rewards"

    policy: ActorCriticPolicyConfig = ActorCriticPolicyConfig()
