"""`rlhf dpo`: preference optimization on pairs."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.commands.offline import NEVER_OFFLINE, OfflineConfig
from rlhf_cli.config.data import PreferenceDataConfig
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.preference import PairLossConfig
from rlhf_cli.config.presets import defaults_of_pair_loss
from rlhf_cli.config.train import OptimConfig


class DPOConfig(OfflineConfig):
    """Train a policy on preference pairs: DPO, IPO, SimPO, ORPO and other losses."""

    command = "dpo"
    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized --output runs/dpo "
        "--beta 0.1 --max_len 2048 --train_batch_size 64 --max_epochs 1 --learning_rate 1e-6 --lora_rank 0"
    )

    unsupported = NEVER_OFFLINE

    data: PreferenceDataConfig
    pictures: PicturesConfig = PicturesConfig()
    preference: PairLossConfig = PairLossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optim: OptimConfig = OptimConfig(learning_rate=5e-7)

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return super().implied(given) | defaults_of_pair_loss(given)
