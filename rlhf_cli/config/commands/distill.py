"""The settings of `rlhf distill`."""

from rlhf_cli.config.commands.offline import NEVER_OFFLINE, PROMPT_SHARING, OfflineConfig
from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.distillation import DistillationConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import BatchConfig


class DistillConfig(OfflineConfig):
    """Settings of `rlhf distill`."""

    unsupported = NEVER_OFFLINE | PROMPT_SHARING | {"distillation.lmbda"}

    data: DataConfig
    pictures: PicturesConfig = PicturesConfig()
    distillation: DistillationConfig
    batch: BatchConfig = BatchConfig(max_epochs=2)
