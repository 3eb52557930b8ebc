"""`rlhf prm`: train a process reward model on labelled steps."""

from rlhf_cli.config.commands.prm import PRMConfig
from rlhf_cli.runs.launch import begin_ranks


def prm(config: PRMConfig) -> None:
    """Train a process reward model, which predicts for each step in a solution the probability that it is correct."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.prm import prm_task
    from rlhf_cli.runs.offline.run import run_offline

    run_offline(config, prm_task(config))
