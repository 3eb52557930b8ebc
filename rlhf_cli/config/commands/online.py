"""The settings that all online commands have; each command replaces groups by its own, which may add fields."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.evaluation import EvaluationConfig
from rlhf_cli.config.model import LoraConfig, ModelConfig, MovingReferenceConfig
from rlhf_cli.config.online import (
    ActorCriticBatchConfig,
    ActorCriticDeepSpeedConfig,
    ActorCriticOptimConfig,
    ActorOptimConfig,
    CriticModelConfig,
    OnlineBatchConfig,
    OnlineDeepSpeedConfig,
)
from rlhf_cli.config.placement import CriticPlacementConfig, PlacementConfig
from rlhf_cli.config.policy import ActorCriticPolicyConfig, PolicyConfig
from rlhf_cli.config.presets import defaults_of_loss
from rlhf_cli.config.rollout import DynamicSamplingConfig, RolloutConfig
from rlhf_cli.config.scoring import OnlineRewardConfig
from rlhf_cli.config.train import OnlineCheckpointConfig, TrackingConfig


class OnlineConfig(BaseModel):
    """Settings of an online command without a critic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    adapter: LoraConfig = LoraConfig()
    prompts: PromptConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: OnlineRewardConfig
    policy: PolicyConfig = PolicyConfig()
    reference: MovingReferenceConfig = MovingReferenceConfig()
    placement: PlacementConfig = PlacementConfig()
    batch: OnlineBatchConfig = OnlineBatchConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    optim: ActorOptimConfig = ActorOptimConfig()
    deepspeed: OnlineDeepSpeedConfig = OnlineDeepSpeedConfig()
    checkpoint: OnlineCheckpointConfig
    tracking: TrackingConfig = TrackingConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return defaults_of_loss(given)

    @property
    def dynamic_sampling(self) -> DynamicSamplingConfig | None:
        """The settings of dynamic sampling; None if it is off or the command has none."""
        return None

    @model_validator(mode="after")
    def _best_is_judged(self) -> "OnlineConfig":
        key = self.evaluation.best_metric_key
        if key is not None and key != "eval/reward" and not self.reward.has_verifier:
            raise ValueError(
                f"best_metric_key {key} counts right responses: name a verifier in --reward_funcs, or take eval/reward"
            )
        return self


class FilteringConfig(OnlineConfig):
    """Settings of an online command that can replace prompts by what their responses are worth."""

    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()

    @property
    def dynamic_sampling(self) -> DynamicSamplingConfig | None:
        """The settings of dynamic sampling; None if it is off."""
        return self.dynamic if self.dynamic.dynamic_filtering else None


class CriticConfig(FilteringConfig):
    """Settings of an online command that trains a critic."""

    policy: ActorCriticPolicyConfig = ActorCriticPolicyConfig()
    critic: CriticModelConfig = CriticModelConfig()
    placement: CriticPlacementConfig = CriticPlacementConfig()
    batch: ActorCriticBatchConfig = ActorCriticBatchConfig()
    optim: ActorCriticOptimConfig = ActorCriticOptimConfig()
    deepspeed: ActorCriticDeepSpeedConfig = ActorCriticDeepSpeedConfig()
