"""The settings of `rlhf quickstart`."""

from typing import Annotated, Literal

from pydantic import field_validator

from rlhf_cli.command_table import POLICY_GRADIENT
from rlhf_cli.config.base import CommandConfig, Excludes, SettingsGroup


class QuickstartGroup(SettingsGroup):
    """Quickstart"""

    output: str = "quickstart"
    """Folder for the data, the models and the runs."""
    images: bool = False
    """Teach a tiny vision-language model to answer questions about pictures, instead of a language model to add."""
    environment: Annotated[Literal["calculator"] | None, Excludes("images")] = None
    """Teach the language model to call a tool for sums of larger numbers, and compare it with practice without one."""
    algorithm: Literal[*POLICY_GRADIENT] | None = None  # type: ignore[valid-type]
    """Command to practise with; its own settings stay as they are by default. Without it ppo, with --images or
    --environment grpo."""
    seed: int = 42
    """Seed of data, model and training."""
    overwrite: bool = False
    """Replace what an earlier quickstart left in the folder."""

    @field_validator("output")
    @classmethod
    def _models_can_be_listed(cls, output: str) -> str:
        if "," in output:
            raise ValueError(f"{output!r} has a comma, which separates models on a command line")
        return output


class QuickstartConfig(CommandConfig):
    """Settings of `rlhf quickstart`."""

    quickstart: QuickstartGroup = QuickstartGroup()
