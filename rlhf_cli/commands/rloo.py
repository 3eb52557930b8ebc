"""`rlhf rloo`: responses against the mean of the others to the same prompt, without a critic.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from rlhf_cli.commands.online_config import FilteringConfig
from rlhf_cli.config.online import RolloutConfig


class RLOOConfig(FilteringConfig):
    """Settings of `rlhf rloo`."""

    rollout: RolloutConfig = RolloutConfig(rollout_batch_size=128, n_samples_per_prompt=8)


def rloo(config: RLOOConfig) -> None:
    """Train a policy online without a critic: each response against the mean of the others to its prompt (RLOO)."""
    from rlhf_cli.commands.run_directory import check_run_directory

    check_run_directory(config.checkpoint)
    from rlhf_cli.commands.online import run_online

    run_online(config, "rloo", algorithm="rloo")
