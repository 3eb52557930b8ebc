"""`rlhf rloo`: online reinforcement learning with a leave-one-out baseline."""

from rlhf_cli.config.commands.rloo import RLOOConfig


def rloo(config: RLOOConfig) -> None:
    """Train a policy online without a critic, with a leave-one-out baseline over the group (RLOO)."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "rloo", estimator="rloo")
