"""`rlhf distill`: distillation from a teacher's token distributions on fixed examples."""

from rlhf_cli.config.commands.distill import DistillConfig
from rlhf_cli.runs.launch import begin_ranks


def distill(config: DistillConfig) -> None:
    """Distill a teacher into a student: match the teacher's token distributions on fixed examples."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.distill import distill_task
    from rlhf_cli.runs.offline.run import run_offline

    run_offline(config, distill_task(config))
