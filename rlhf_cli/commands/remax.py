"""`rlhf remax`: responses against the greedy one to the same prompt, without a critic.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from rlhf_cli.commands.online_config import OnlineConfig


class ReMaxConfig(OnlineConfig):
    """Settings of `rlhf remax`."""


def remax(config: ReMaxConfig) -> None:
    """Train a policy online without a critic: each response against the greedy one to its prompt (ReMax)."""
    from rlhf_cli.commands.run_directory import check_run_directory

    check_run_directory(config.checkpoint)
    from rlhf_cli.commands.online import run_online

    run_online(config, "remax", algorithm="remax")
