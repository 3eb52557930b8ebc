"""The settings that all online commands have; each command replaces groups by its own, which may say more."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.online import ActorOptimConfig, OnlineRewardConfig, PlacementConfig, RolloutConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.presets import defaults_of_loss
from rlhf_cli.config.train import BatchConfig, CheckpointConfig, DeepSpeedConfig, TrackingConfig


class OnlineConfig(BaseModel):
    """Settings of an online command without a critic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    prompts: PromptConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: OnlineRewardConfig
    policy: PolicyConfig = PolicyConfig()
    placement: PlacementConfig = PlacementConfig()
    batch: BatchConfig = BatchConfig()
    optim: ActorOptimConfig = ActorOptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on what was given."""
        return defaults_of_loss(given)
