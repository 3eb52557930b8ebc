"""`rlhf sft`: supervised fine-tuning.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import (
    BatchConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    LaunchConfig,
    SingleOptimConfig,
    TrackingConfig,
)
from rlhf_cli.errors import RunError


class SFTConfig(BaseModel):
    """Settings of `rlhf sft`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    optim: SingleOptimConfig = SingleOptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()


def sft(config: SFTConfig) -> None:
    """Fine-tune a language model on examples: prompts with responses, conversations, or plain text."""
    raise RunError(f"training of {config.model.pretrain} is not wired yet")
