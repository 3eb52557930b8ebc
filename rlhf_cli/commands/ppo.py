"""`rlhf ppo`: online reinforcement learning with a critic."""

from rlhf_cli.config.commands.online import CriticConfig


def ppo(config: CriticConfig) -> None:
    """Train a policy and a critic online: sample responses, score them, update both (PPO with GAE)."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "ppo", estimator="ppo")
