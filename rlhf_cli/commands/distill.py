"""`rlhf distill`: learning from a teacher's distributions over tokens."""

from rlhf_cli.config.commands.distill import DistillConfig
from rlhf_cli.runs.launch import begin_ranks


def distill(config: DistillConfig) -> None:
    """Train a language model to give the tokens of examples the probabilities that a teacher gives them."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.distill import distill_task
    from rlhf_cli.runs.offline.run import run_offline

    run_offline(config, distill_task(config))
