"""The settings of `rlhf kto`."""

from rlhf_cli.config.commands.offline import NEVER_OFFLINE, PROMPT_SHARING, OfflineConfig
from rlhf_cli.config.data import LabelledDataConfig
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.preference import UnpairedLossConfig
from rlhf_cli.config.train import OptimConfig


class KTOConfig(OfflineConfig):
    """Settings of `rlhf kto`."""

    unsupported = NEVER_OFFLINE | PROMPT_SHARING | {"reference.ref_sync_steps", "reference.ref_mixup_alpha"}

    data: LabelledDataConfig
    pictures: PicturesConfig = PicturesConfig()
    preference: UnpairedLossConfig = UnpairedLossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optim: OptimConfig = OptimConfig(learning_rate=5e-7)
