"""`rlhf distill`: distillation from a teacher's token distributions on fixed examples."""

from pydantic import model_validator

from rlhf_cli.commands.offline import NEVER_OFFLINE, PROMPT_SHARING, OfflineConfig
from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.distillation import DistillationConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import BatchConfig


class DistillConfig(OfflineConfig):
    """Distill a teacher into a student: match the teacher's token distributions on fixed examples."""

    command = "distill"
    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --teacher_pretrain Qwen/Qwen2.5-7B-Instruct "
        "--dataset trl-lib/Capybara --output runs/distill --max_len 2048 --train_batch_size 64 --max_epochs 1 "
        "--learning_rate 1e-5"
    )

    unsupported = NEVER_OFFLINE | PROMPT_SHARING | {"distillation.lmbda"}

    data: DataConfig
    pictures: PicturesConfig = PicturesConfig()
    distillation: DistillationConfig
    batch: BatchConfig = BatchConfig(max_epochs=2)

    @model_validator(mode="after")
    def _check_teachers(self) -> "DistillConfig":
        if self.deepspeed.sequence_parallel_size > 1:
            self.distillation.check_whole_sequences()
        if self.data.pretrain_mode and self.distillation.teacher_tokenizer == "own":
            raise ValueError("teacher_tokenizer own compares responses, but pretrain_mode trains on all text")
        return self
