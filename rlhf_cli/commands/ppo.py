"""`rlhf ppo`: online reinforcement learning with a critic.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from rlhf_cli.commands.online_config import FilteringConfig
from rlhf_cli.config.online import ActorCriticBatchConfig, ActorCriticOptimConfig, CriticPlacementConfig
from rlhf_cli.config.policy import ActorCriticPolicyConfig


class PPOConfig(FilteringConfig):
    """Settings of `rlhf ppo`."""

    policy: ActorCriticPolicyConfig = ActorCriticPolicyConfig()
    placement: CriticPlacementConfig = CriticPlacementConfig()
    batch: ActorCriticBatchConfig = ActorCriticBatchConfig()
    optim: ActorCriticOptimConfig = ActorCriticOptimConfig()


def ppo(config: PPOConfig) -> None:
    """Train a policy and a critic online: sample responses, score them, update both (PPO with GAE)."""
    from rlhf_cli.commands.run_directory import check_run_directory

    check_run_directory(config.checkpoint)
    from rlhf_cli.commands.online import run_online

    run_online(config, "ppo", algorithm="ppo")
