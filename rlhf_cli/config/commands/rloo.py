"""The settings of `rlhf rloo`."""

from rlhf_cli.config.commands.online import NEVER_ONLINE, OF_A_CRITIC, OnlineConfig
from rlhf_cli.config.rollout import RolloutConfig


class RLOOConfig(OnlineConfig):
    """Settings of `rlhf rloo`."""

    unsupported = NEVER_ONLINE | OF_A_CRITIC

    rollout: RolloutConfig = RolloutConfig(rollout_batch_size=128, n_samples_per_prompt=8)
