"""`rlhf sft`: supervised fine-tuning."""

from rlhf_cli.commands.offline import NEVER_OFFLINE, PROMPT_SHARING, OfflineConfig
from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import BatchConfig


class SFTConfig(OfflineConfig):
    """Supervised fine-tuning on prompts with responses, conversations, or plain text."""

    command = "sft"

    unsupported = (NEVER_OFFLINE | PROMPT_SHARING) - {"model.keep_dropout"}

    data: DataConfig
    pictures: PicturesConfig = PicturesConfig()
    batch: BatchConfig = BatchConfig(max_epochs=2)
