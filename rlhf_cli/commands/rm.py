"""`rlhf rm`: train a reward model on preference pairs."""

from rlhf_cli.config.commands.rm import RMConfig
from rlhf_cli.runs.launch import begin_ranks


def rm(config: RMConfig) -> None:
    """Train a reward model on preference pairs, to score the chosen response higher than the rejected one."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.rm import rm_task
    from rlhf_cli.runs.offline.run import run_offline

    run_offline(config, rm_task(config))
