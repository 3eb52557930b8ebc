"""`rlhf quickstart`: the full training pipeline on a tiny model."""

from typing import Annotated, Literal

from pydantic import field_validator

from rlhf_cli.command_table import POLICY_GRADIENT
from rlhf_cli.config.base import CommandConfig, Excludes, SettingsGroup


class QuickstartGroup(SettingsGroup):
    """Quickstart"""

    output: str = "quickstart"
    """Folder for data, models and runs."""
    images: bool = False
    """Train a tiny vision-language model to answer questions about images, instead of a language model to add
    numbers.
    """
    environment: Annotated[Literal["calculator"] | None, Excludes("images")] = None
    """Train the language model to call a tool for sums of larger numbers, and compare it with training without
    tools.
    """
    algorithm: Literal[*POLICY_GRADIENT] | None = None  # type: ignore[valid-type]
    """Training command to use, with its default settings. Default: ppo; with --images or --environment grpo."""
    seed: int = 42
    """Random seed of data, model and training."""
    overwrite: bool = False
    """Replace an earlier quickstart in the folder."""

    @field_validator("output")
    @classmethod
    def _check_output_name(cls, output: str) -> str:
        if "," in output:
            raise ValueError(f"{output!r} has a comma, which separates models on a command line")
        return output


class QuickstartConfig(CommandConfig):
    """Train a tiny model to add numbers: sft until some sums are correct, ppo until nearly all are, then compare both.

    With --images, the model learns to read images instead; with --environment, to call a calculator. Prints each
    command, so that you can run and modify it. Takes a few minutes on a laptop.
    """

    quickstart: QuickstartGroup = QuickstartGroup()
