"""`rlhf prm`: train a process reward model on labelled steps."""

from rlhf_cli.config.commands.prm import PRMConfig
from rlhf_cli.runs.launch import begin_ranks


def prm(config: PRMConfig) -> None:
    """Train a process reward model: the probability that a step of a solution is right."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.prm import prm_task
    from rlhf_cli.runs.offline.run import run_offline

    run_offline(config, prm_task(config))
