"""The settings of `rlhf reinforce++`."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.algorithms.estimators.reinforce import ReinforcePolicyConfig
from rlhf_cli.config.commands.online import NEVER_ONLINE, OF_A_CRITIC, OnlineConfig
from rlhf_cli.config.presets import defaults_of_baseline


class ReinforceConfig(OnlineConfig):
    """Settings of `rlhf reinforce++`."""

    unsupported = NEVER_ONLINE | OF_A_CRITIC

    policy: ReinforcePolicyConfig = ReinforcePolicyConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return super().implied(given) | defaults_of_baseline(given)
