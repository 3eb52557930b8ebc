"""The settings of `rlhf rm`."""

from rlhf_cli.config.commands.offline import OfflineConfig
from rlhf_cli.config.data import PreferenceDataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.preference import RewardLossConfig
from rlhf_cli.config.train import SingleOptimConfig


class RMConfig(OfflineConfig):
    """Settings of `rlhf rm`."""

    data: PreferenceDataConfig
    pictures: PicturesConfig = PicturesConfig()
    reward: RewardLossConfig = RewardLossConfig()
    optim: SingleOptimConfig = SingleOptimConfig(learning_rate=9e-6)
