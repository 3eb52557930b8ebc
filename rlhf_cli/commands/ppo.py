"""`rlhf ppo`: online reinforcement learning with a critic.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from rlhf_cli.commands.online_config import CriticConfig


def ppo(config: CriticConfig) -> None:
    """Train a policy and a critic online: sample responses, score them, update both (PPO with GAE)."""
    from rlhf_cli.commands.run_directory import check_run_directory

    check_run_directory(config.checkpoint)
    from rlhf_cli.commands.online import run_online

    run_online(config, "ppo", algorithm="ppo")
