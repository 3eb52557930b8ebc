"""`rlhf remax`: online reinforcement learning with a greedy response as baseline."""

from rlhf_cli.config.commands.remax import ReMaxConfig


def remax(config: ReMaxConfig) -> None:
    """Train a policy online without a critic, with the greedy response's reward as baseline (ReMax)."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "remax", estimator="remax")
