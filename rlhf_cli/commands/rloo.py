"""`rlhf rloo`: online reinforcement learning with a leave-one-out baseline."""

from rlhf_cli.config.commands.rloo import RLOOConfig


def rloo(config: RLOOConfig) -> None:
    """Train a policy online without a critic: each response against the mean of the others to its prompt (RLOO)."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "rloo", estimator="rloo")
