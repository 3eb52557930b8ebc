"""The settings of `rlhf scratch`."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.scratch import ArchitectureConfig, ScratchConfigGroup, VisionTowerConfig


class ScratchConfig(CommandConfig):
    """Settings of `rlhf scratch`."""

    new: ScratchConfigGroup
    architecture: ArchitectureConfig = ArchitectureConfig()
    tower: VisionTowerConfig = VisionTowerConfig()
