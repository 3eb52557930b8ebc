"""The settings of `rlhf scratch`."""

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.scratch import ArchitectureConfig, ScratchConfigGroup, VisionTowerConfig


class ScratchConfig(BaseModel):
    """Settings of `rlhf scratch`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    new: ScratchConfigGroup
    architecture: ArchitectureConfig = ArchitectureConfig()
    tower: VisionTowerConfig = VisionTowerConfig()
