"""`rlhf sft`: supervised fine-tuning."""

from rlhf_cli.commands.offline import NEVER_OFFLINE, PROMPT_SHARING, OfflineConfig
from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.sft import SFTLossConfig
from rlhf_cli.config.train import BatchConfig


class SFTConfig(OfflineConfig):
    """Supervised fine-tuning on prompts with responses, conversations, or plain text."""

    command = "sft"
    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/Capybara --output runs/sft "
        "--max_len 2048 --train_batch_size 64 --max_epochs 2 --learning_rate 5e-5 --lora_rank 16"
    )

    unsupported = (NEVER_OFFLINE | PROMPT_SHARING) - {"model.keep_dropout"}

    data: DataConfig
    pictures: PicturesConfig = PicturesConfig()
    objective: SFTLossConfig = SFTLossConfig()
    batch: BatchConfig = BatchConfig(max_epochs=2)
