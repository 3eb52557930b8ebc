"""`rlhf grpo`: online reinforcement learning with group-relative advantages."""

from rlhf_cli.config.commands.grpo import GRPOConfig


def grpo(config: GRPOConfig) -> None:
    """Train a policy online with group-relative advantages and no critic: GRPO, Dr. GRPO, DAPO, GSPO."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "grpo", estimator=config.policy.estimator)
