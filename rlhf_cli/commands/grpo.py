"""`rlhf grpo`: responses compared with the others to the same prompt, without a critic.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.commands.online_config import FilteringConfig
from rlhf_cli.config.online import RolloutConfig
from rlhf_cli.config.policy import GroupPolicyConfig
from rlhf_cli.config.presets import defaults_of_preset


class GRPOConfig(FilteringConfig):
    """Settings of `rlhf grpo`."""

    rollout: RolloutConfig = RolloutConfig(rollout_batch_size=128, n_samples_per_prompt=8)
    policy: GroupPolicyConfig = GroupPolicyConfig(use_kl_loss=True, kl_estimator="k3")

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on what was given."""
        return defaults_of_preset(given)


def grpo(config: GRPOConfig) -> None:
    """Train a policy online on responses compared within their prompt, without a critic: GRPO, Dr. GRPO, DAPO, GSPO."""
    from rlhf_cli.commands.run_directory import check_run_directory

    check_run_directory(config.checkpoint)
    from rlhf_cli.commands.online import run_online

    run_online(config, "grpo", algorithm=config.policy.row)
