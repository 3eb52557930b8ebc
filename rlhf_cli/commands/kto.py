"""`rlhf kto`: preference optimization on single labelled responses."""

from rlhf_cli.config.commands.kto import KTOConfig
from rlhf_cli.runs.launch import begin_ranks


def kto(config: KTOConfig) -> None:
    """Train a policy on single responses labelled desirable or undesirable (KTO)."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.kto import kto_task
    from rlhf_cli.runs.offline.run import run_offline

    run_offline(config, kto_task(config))
