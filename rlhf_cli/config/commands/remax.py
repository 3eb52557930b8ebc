"""The settings of `rlhf remax`."""

from rlhf_cli.config.commands.online import NEVER_ONLINE, OF_A_CRITIC, OnlineConfig
from rlhf_cli.config.scoring import STEP_REWARDS


class ReMaxConfig(OnlineConfig):
    """Settings of `rlhf remax`."""

    unsupported = NEVER_ONLINE | OF_A_CRITIC | STEP_REWARDS | {"dynamic"}
    compares_rewards = "greedy responses are compared by their reward"
