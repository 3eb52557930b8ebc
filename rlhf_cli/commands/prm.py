"""`rlhf prm`: train a process reward model on labelled steps."""

from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.config.data import StepDataConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import OptimConfig


class PRMConfig(OfflineConfig):
    """Train a process reward model, which predicts for each step in a solution the probability that it is correct."""

    command = "prm"

    data: StepDataConfig
    pictures: PicturesConfig = PicturesConfig()
    optim: OptimConfig = OptimConfig(learning_rate=1e-6)
