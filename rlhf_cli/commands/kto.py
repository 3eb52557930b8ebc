"""`rlhf kto`: preference optimization on single labelled responses."""

from rlhf_cli.commands.offline import NEVER_OFFLINE, PROMPT_SHARING, OfflineConfig
from rlhf_cli.config.data import LabelledDataConfig
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.preference import UnpairedLossConfig
from rlhf_cli.config.train import OptimConfig


class KTOConfig(OfflineConfig):
    """Train a policy on single responses labelled desirable or undesirable (KTO)."""

    command = "kto"

    unsupported = NEVER_OFFLINE | PROMPT_SHARING | {"reference.ref_sync_steps", "reference.ref_mixup_alpha"}

    data: LabelledDataConfig
    pictures: PicturesConfig = PicturesConfig()
    preference: UnpairedLossConfig = UnpairedLossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optim: OptimConfig = OptimConfig(learning_rate=5e-7)
