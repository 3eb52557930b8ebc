"""`rlhf kto`: preference optimization on single labeled responses."""

from rlhf_cli.commands.offline import NEVER_OFFLINE, PROMPT_SHARING, OfflineConfig
from rlhf_cli.config.data import LabelledDataConfig
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.preference import UnpairedLossConfig
from rlhf_cli.config.train import OptimConfig


class KTOConfig(OfflineConfig):
    """Train a policy on single responses labeled desirable or undesirable (KTO)."""

    command = "kto"
    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/kto-mix-14k --output runs/kto "
        "--beta 0.1 --max_len 2048 --train_batch_size 64 --max_epochs 1 --learning_rate 1e-6 --lora_rank 0"
    )

    unsupported = NEVER_OFFLINE | PROMPT_SHARING | {"reference.ref_sync_steps", "reference.ref_mixup_alpha"}

    data: LabelledDataConfig
    pictures: PicturesConfig = PicturesConfig()
    preference: UnpairedLossConfig = UnpairedLossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optim: OptimConfig = OptimConfig(learning_rate=5e-7)
