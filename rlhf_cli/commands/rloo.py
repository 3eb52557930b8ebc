"""`rlhf rloo`: online reinforcement learning with a leave-one-out baseline."""

from rlhf_cli.commands.online import NEVER_ONLINE, OnlineConfig
from rlhf_cli.config.rollout import RolloutConfig


class RLOOConfig(OnlineConfig):
    """Train a policy online without a critic, with a leave-one-out baseline over the group (RLOO)."""

    command = "rloo"

    unsupported = NEVER_ONLINE | {"critic"}

    rollout: RolloutConfig = RolloutConfig(rollout_batch_size=128, n_samples_per_prompt=8)
