"""`rlhf quickstart`: the full training pipeline on a tiny model."""

from rlhf_cli.config.commands.quickstart import QuickstartConfig


def quickstart(config: QuickstartConfig) -> None:
    """Train a tiny model to add numbers: sft until some sums are correct, ppo until nearly all are, then compare both.

    With --images, the model learns to read images instead; with --environment, to call a calculator. Prints each
    command, so that you can run and modify it. Takes a few minutes on a laptop.
    """
    from rlhf_cli.runs.quickstart import run_quickstart

    run_quickstart(config.quickstart)
