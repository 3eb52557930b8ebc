"""The settings of `rlhf prm`."""

from rlhf_cli.config.commands.offline import OfflineConfig
from rlhf_cli.config.data import StepDataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import OptimConfig


class PRMConfig(OfflineConfig):
    """Settings of `rlhf prm`."""

    data: StepDataConfig
    pictures: PicturesConfig = PicturesConfig()
    optim: OptimConfig = OptimConfig(learning_rate=1e-6)
