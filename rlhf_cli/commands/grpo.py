"""`rlhf grpo`: online reinforcement learning with advantages relative to the prompt's group."""

from rlhf_cli.config.commands.grpo import GRPOConfig


def grpo(config: GRPOConfig) -> None:
    """Train a policy online on responses compared within their prompt, without a critic: GRPO, Dr. GRPO, DAPO, GSPO."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "grpo", estimator=config.policy.estimator)
