"""The settings of `rlhf sft`."""

from rlhf_cli.config.commands.offline import NEVER_OFFLINE, PROMPT_SHARING, OfflineConfig
from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import BatchConfig


class SFTConfig(OfflineConfig):
    """Settings of `rlhf sft`."""

    unsupported = (NEVER_OFFLINE | PROMPT_SHARING) - {"model.keep_dropout"}

    data: DataConfig
    pictures: PicturesConfig = PicturesConfig()
    batch: BatchConfig = BatchConfig(max_epochs=2)
