"""`rlhf grpo`: online reinforcement learning with group-relative advantages."""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig
from rlhf_cli.commands.online import NEVER_ONLINE, OnlineConfig
from rlhf_cli.config.presets import defaults_of_preset
from rlhf_cli.config.rollout import RolloutConfig


class GRPOConfig(OnlineConfig):
    """Train a policy online with group-relative advantages and no critic: GRPO, Dr. GRPO, DAPO, GSPO."""

    command = "grpo"

    unsupported = NEVER_ONLINE | {"critic"}

    rollout: RolloutConfig = RolloutConfig(rollout_batch_size=128, n_samples_per_prompt=8)
    policy: GroupPolicyConfig = GroupPolicyConfig(use_kl_loss=True, kl_estimator="k3")

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return super().implied(given) | defaults_of_preset(given)

    @model_validator(mode="after")
    def _check_aggregate_with_teacher(self) -> "GRPOConfig":
        if self.distils_alone and self.policy.aggregate == "normalize_then_sum":
            raise ValueError("aggregate normalize_then_sum normalizes rewards, but only the teacher is used")
        return self

    @model_validator(mode="after")
    def _check_turns(self) -> "GRPOConfig":
        if self.policy.advantage == "gigpo" and not self.plays_episodes:
            raise ValueError(
                "advantage gigpo compares turns that follow the same observation: set --environment or --agent_command"
            )
        return self

    @model_validator(mode="after")
    def _check_step_rewards(self) -> "GRPOConfig":
        if self.reward.prm_pretrain is not None and self.policy.advantage_std == "none":
            raise ValueError("prm_pretrain divides step rewards by their std, but advantage_std is none")
        return self

    @property
    def estimator(self) -> str:
        """The estimator of the preset and of the rewards."""
        return self.policy.estimator
