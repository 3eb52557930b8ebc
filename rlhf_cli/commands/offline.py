"""Settings shared by offline commands. Each command replaces groups and adds its loss."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import OF_PROMPTS, OfflineDataConfig, TemplateConfig
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.config.presets import defaults_of_adapter
from rlhf_cli.config.train import (
    OWN_SETTINGS_OF_ROLES,
    BatchConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    LaunchConfig,
    OptimConfig,
    TrackingConfig,
)

PROMPT_SHARING = frozenset({"batch.share_prompts"})
NEVER_OFFLINE = (
    OWN_SETTINGS_OF_ROLES
    | OF_PROMPTS
    | {
        "batch.critic_update_steps",
        "batch.freezing_actor_steps",
        "optim.actor_learning_rate",
        "optim.critic_learning_rate",
        "optim.enable_ema",
        "optim.ema_beta",
        "checkpoint.max_restarts",
        "adapter.lora_push",
        "model.keep_dropout",
    }
)
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
