"""Settings shared by offline commands. Each command replaces groups and adds its loss."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import OF_PROMPTS, OfflineDataConfig, TemplateConfig
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.config.presets import defaults_of_adapter
from rlhf_cli.config.train import (
    BatchConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    LaunchConfig,
    OptimConfig,
    TrackingConfig,
)

PROMPT_SHARING = frozenset({"batch.share_prompts"})
NEVER_OFFLINE = OF_PROMPTS | {
    "optim.actor_learning_rate",
    "optim.enable_ema",
    "optim.ema_beta",
    "checkpoint.max_restarts",
    "adapter.lora_push",
    "model.keep_dropout",
    "tracking.print_samples",
}
"""Settings that no offline command supports."""


class OfflineConfig(CommandConfig):
    """Settings of an offline training command."""

    unsupported = NEVER_OFFLINE | PROMPT_SHARING

    model: ModelConfig
    adapter: LoraConfig = LoraConfig()
    data: OfflineDataConfig
    template: TemplateConfig = TemplateConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return defaults_of_adapter(given, cls.model_fields["optim"].default)

    @property
    def partitions_weights(self) -> bool:
        """Whether the model uses ZeRO-3."""
        return self.deepspeed.zero_stage == 3

    @property
    def shares_sequences(self) -> bool:
        """Whether the model uses sequence parallelism."""
        return self.deepspeed.sequence_parallel_size > 1
