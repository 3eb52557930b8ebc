"""`rlhf rm`: train a reward model on preference pairs."""

from rlhf_cli.commands.offline import NEVER_OFFLINE, OfflineConfig
from rlhf_cli.config.data import PreferenceDataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.preference import RewardLossConfig
from rlhf_cli.config.train import OptimConfig


class RMConfig(OfflineConfig):
    """Train a reward model on preference pairs, to score the chosen response higher than the rejected one."""

    command = "rm"

    unsupported = NEVER_OFFLINE

    data: PreferenceDataConfig
    pictures: PicturesConfig = PicturesConfig()
    reward: RewardLossConfig = RewardLossConfig()
    optim: OptimConfig = OptimConfig(learning_rate=9e-6)
