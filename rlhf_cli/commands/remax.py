"""`rlhf remax`: online reinforcement learning with a greedy response as baseline."""

from rlhf_cli.commands.online import NEVER_ONLINE, OnlineConfig
from rlhf_cli.config.scoring import STEP_REWARDS


class ReMaxConfig(OnlineConfig):
    """Train a policy online without a critic, with the greedy response's reward as baseline (ReMax)."""

    command = "remax"

    unsupported = NEVER_ONLINE | STEP_REWARDS | {"critic", "dynamic"}
    needs_reward = "the baseline is the reward of the greedy response"
