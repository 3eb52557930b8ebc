"""`rlhf ppo`: online reinforcement learning with a critic."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.commands.online import NEVER_ONLINE, OnlineConfig
from rlhf_cli.config.presets import defaults_of_preset


class PPOConfig(OnlineConfig):
    """Train a policy and a critic online on sampled, scored responses (PPO with GAE)."""

    command = "ppo"

    unsupported = NEVER_ONLINE
    needs_reward = "the critic predicts rewards"

    policy: ActorCriticPolicyConfig = ActorCriticPolicyConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return super().implied(given) | defaults_of_preset(given)
