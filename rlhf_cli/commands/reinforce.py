"""`rlhf reinforce++`: rewards whitened over the whole batch, without a critic.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.commands.online_config import FilteringConfig
from rlhf_cli.config.policy import ReinforcePolicyConfig
from rlhf_cli.config.presets import defaults_of_baseline, defaults_of_loss


class ReinforceConfig(FilteringConfig):
    """Settings of `rlhf reinforce++`."""

    policy: ReinforcePolicyConfig = ReinforcePolicyConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on what was given."""
        return defaults_of_loss(given) | defaults_of_baseline(given)


def reinforce(config: ReinforceConfig) -> None:
    """Train a policy online without a critic, on rewards whitened over the whole batch (REINFORCE++)."""
    from rlhf_cli.commands.run_directory import check_run_directory

    check_run_directory(config.checkpoint)
    from rlhf_cli.commands.online import run_online

    run_online(
        config, "reinforce++", algorithm="reinforce++_group" if config.policy.baseline == "group" else "reinforce++"
    )
