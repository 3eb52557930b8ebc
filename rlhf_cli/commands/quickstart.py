"""`rlhf quickstart`: the whole pipeline on a tiny model."""

from rlhf_cli.config.commands.quickstart import QuickstartConfig


def quickstart(config: QuickstartConfig) -> None:
    """Teach a tiny model to add: sft until it is sometimes right, ppo until it nearly always is, then compare both.

    With --images the model learns to look at pictures instead, with --environment to call a calculator.
    Prints every command it runs, so that you can run and change them yourself. Takes a few minutes on a laptop.
    """
    from rlhf_cli.runs.quickstart import run_quickstart

    run_quickstart(config.quickstart)
