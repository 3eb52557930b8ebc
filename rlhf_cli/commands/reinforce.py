"""`rlhf reinforce++`: online reinforcement learning with batch-whitened advantages."""

from rlhf_cli.config.commands.reinforce import ReinforceConfig


def reinforce(config: ReinforceConfig) -> None:
    """Train a policy online without a critic, with advantages whitened over the batch (REINFORCE++)."""
    from rlhf_cli.runs.online.run import run_online

    run_online(
        config, "reinforce++", estimator="reinforce++_group" if config.policy.baseline == "group" else "reinforce++"
    )
