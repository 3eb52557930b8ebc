"""`rlhf prm`: train a process reward model on labeled steps."""

from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.config.data import StepDataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import OptimConfig


class PRMConfig(OfflineConfig):
    """Train a process reward model, which predicts for each step in a solution the probability that it is correct."""

    command = "prm"
    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/prm800k --output runs/prm "
        "--max_len 2048 --train_batch_size 64 --max_epochs 1 --learning_rate 1e-5 --lora_rank 0"
    )

    data: StepDataConfig
    pictures: PicturesConfig = PicturesConfig()
    optim: OptimConfig = OptimConfig(learning_rate=1e-6)
