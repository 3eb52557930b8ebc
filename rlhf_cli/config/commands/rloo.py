"""The settings of `rlhf rloo`."""

from rlhf_cli.config.commands.online import FilteringConfig
from rlhf_cli.config.rollout import RolloutConfig


class RLOOConfig(FilteringConfig):
    """Settings of `rlhf rloo`."""

    rollout: RolloutConfig = RolloutConfig(rollout_batch_size=128, n_samples_per_prompt=8)
