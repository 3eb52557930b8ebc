"""The settings of `rlhf quickstart`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from rlhf_cli.config.base import SettingsGroup


class QuickstartGroup(SettingsGroup):
    """Quickstart"""

    output: str = "quickstart"
    """Folder for the data, the models and the runs."""
    images: bool = False
    """Teach a tiny vision-language model to answer questions about pictures, instead of a language model to add."""
    algorithm: Literal["ppo", "reinforce++", "grpo", "rloo", "remax"] | None = None
    """Command to practise with; its own settings stay as they are by default. Without it ppo, with --images grpo."""
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


class QuickstartConfig(BaseModel):
    """Settings of `rlhf quickstart`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quickstart: QuickstartGroup = QuickstartGroup()
