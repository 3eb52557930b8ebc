"""The settings that all offline commands share; each command replaces groups by its own and adds its loss."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import OfflineDataConfig
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.config.presets import defaults_of_adapter
from rlhf_cli.config.train import (
    CheckpointConfig,
    DeepSpeedConfig,
    LaunchConfig,
    OfflineBatchConfig,
    SingleOptimConfig,
    TrackingConfig,
)


class OfflineConfig(CommandConfig):
    """Settings of an offline training command."""

    model: ModelConfig
    adapter: LoraConfig = LoraConfig()
    data: OfflineDataConfig
    batch: OfflineBatchConfig = OfflineBatchConfig()
    optim: SingleOptimConfig = SingleOptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults that depend on the given settings."""
        return defaults_of_adapter(given, cls.model_fields["optim"].default)
