"""`rlhf ppo`: online reinforcement learning with a critic.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.online import (
    ActorCriticOptimConfig,
    OnlineRewardConfig,
    PlacementConfig,
    PolicyConfig,
    RolloutConfig,
)
from rlhf_cli.config.train import BatchConfig, CheckpointConfig, DeepSpeedConfig, TrackingConfig


class PPOConfig(BaseModel):
    """Settings of `rlhf ppo`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    prompts: PromptConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: OnlineRewardConfig
    policy: PolicyConfig = PolicyConfig()
    placement: PlacementConfig = PlacementConfig()
    batch: BatchConfig = BatchConfig()
    optim: ActorCriticOptimConfig = ActorCriticOptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()


def ppo(config: PPOConfig) -> None:
    """Train a policy and a critic online: sample responses, score them, update both (PPO with GAE)."""
    from rlhf_cli.commands.run_directory import check_run_directory

    check_run_directory(config.checkpoint)
    from rlhf_cli.commands.online import run_online

    run_online(config, "ppo")
