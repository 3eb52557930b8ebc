"""The settings of `rlhf reinforce++`."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.config.commands.online import FilteringConfig
from rlhf_cli.config.policy import ReinforcePolicyConfig
from rlhf_cli.config.presets import defaults_of_baseline, defaults_of_loss, defaults_of_roles


class ReinforceConfig(FilteringConfig):
    """Settings of `rlhf reinforce++`."""

    policy: ReinforcePolicyConfig = ReinforcePolicyConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return defaults_of_loss(given) | defaults_of_baseline(given) | defaults_of_roles(given)
