"""`rlhf quickstart`: the whole pipeline on a tiny model, made of the commands a user would type."""

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.base import Group


class QuickstartGroup(Group):
    """Quickstart"""

    output: str = "quickstart"
    """Folder for the data, the models and the runs."""
    seed: int = 42
    """Seed of data, model and training."""
    overwrite: bool = False
    """Replace what an earlier quickstart left in the folder."""


class QuickstartConfig(BaseModel):
    """Settings of `rlhf quickstart`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quickstart: QuickstartGroup = QuickstartGroup()


def quickstart(config: QuickstartConfig) -> None:
    """Teach a tiny model to add: sft until it is sometimes right, ppo until it nearly always is, then evaluate.

    Prints every command it runs, so that you can run and change them yourself. Takes a few minutes on a laptop.
    """
    from rlhf_cli.commands.walkthrough import run_quickstart

    run_quickstart(config.quickstart)
