"""`rlhf scratch`: create a small untrained model, with a tokenizer trained on a dataset."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.scratch import ArchitectureConfig, ScratchConfigGroup, VisionTowerConfig


class ScratchConfig(CommandConfig):
    """Create a small untrained model and tokenizer, for tests without downloads."""

    example = "--dataset sums.jsonl --output runs/tiny --hidden_size 64 --num_hidden_layers 2 --vocab_size 512"

    new: ScratchConfigGroup
    architecture: ArchitectureConfig = ArchitectureConfig()
    tower: VisionTowerConfig = VisionTowerConfig()
