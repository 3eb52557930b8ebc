"""`rlhf reinforce++`: online reinforcement learning with batch-whitened advantages."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.algorithms.estimators.reinforce import ReinforcePolicyConfig
from rlhf_cli.commands.online import NEVER_ONLINE, OnlineConfig
from rlhf_cli.config.presets import defaults_of_baseline


class ReinforceConfig(OnlineConfig):
    """Train a policy online without a critic, with advantages whitened over the batch (REINFORCE++)."""

    command = "reinforce++"

    unsupported = NEVER_ONLINE | {"critic"}

    policy: ReinforcePolicyConfig = ReinforcePolicyConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return super().implied(given) | defaults_of_baseline(given)

    @property
    def estimator(self) -> str:
        """The estimator of the baseline."""
        return "reinforce++_group" if self.policy.baseline == "group" else "reinforce++"
