"""`rlhf ppo`: online reinforcement learning with a critic."""

from rlhf_cli.config.commands.ppo import PPOConfig


def ppo(config: PPOConfig) -> None:
    """Train a policy and a critic online on sampled, scored responses (PPO with GAE)."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "ppo", estimator="ppo")
