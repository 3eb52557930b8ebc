"""`rlhf rm`: train a reward model on preference pairs."""

from rlhf_cli.commands.offline import NEVER_OFFLINE, OfflineConfig
from rlhf_cli.config.data import PreferenceDataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.preference import RewardLossConfig
from rlhf_cli.config.train import OptimConfig


class RMConfig(OfflineConfig):
    """Train a reward model on preference pairs, to score the chosen response higher than the rejected one."""

    command = "rm"
    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized --output runs/rm "
        "--max_len 2048 --train_batch_size 64 --max_epochs 1 --learning_rate 1e-5 --lora_rank 0"
    )

    unsupported = NEVER_OFFLINE

    data: PreferenceDataConfig
    pictures: PicturesConfig = PicturesConfig()
    reward: RewardLossConfig = RewardLossConfig()
    optim: OptimConfig = OptimConfig(learning_rate=9e-6)
