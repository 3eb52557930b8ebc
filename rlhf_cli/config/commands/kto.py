"""The settings of `rlhf kto`."""

from rlhf_cli.config.commands.offline import OfflineConfig
from rlhf_cli.config.data import LabelledDataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.preference import FrozenReferenceConfig, UnpairedLossConfig
from rlhf_cli.config.train import OptimConfig


class KTOConfig(OfflineConfig):
    """Settings of `rlhf kto`."""

    data: LabelledDataConfig
    pictures: PicturesConfig = PicturesConfig()
    preference: UnpairedLossConfig = UnpairedLossConfig()
    reference: FrozenReferenceConfig = FrozenReferenceConfig()
    optim: OptimConfig = OptimConfig(learning_rate=5e-7)
