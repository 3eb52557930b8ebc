"""The teacher of on-policy distillation in an online run."""

from pydantic import Field, model_validator

from rlhf_cli.config.base import SettingsGroup

LEARN_ALONE = "rlhf reinforce++, grpo and rloo learn from a teacher alone"
"""The commands whose advantages need no reward, for the messages of the other ones."""


class TeacherConfig(SettingsGroup):
    """Teacher"""

    teacher_pretrain: str | None = None
    """Model that judges each token of the policy's own responses, alone or beside rewards: a folder, a run directory or
    a Hugging Face name; same token ids. With a teacher init_kl_coef is 0 by default, so there is no reference."""
    distill_coef: float = Field(1.0, gt=0)
    """Weight of the teacher: a token's advantage gets distill_coef times (teacher's log-prob less the policy's)."""

    @property
    def weight(self) -> float | None:
        """The weight of the teacher; None if there is no teacher."""
        return None if self.teacher_pretrain is None else self.distill_coef

    @model_validator(mode="after")
    def _a_weight_is_of_a_teacher(self) -> "TeacherConfig":
        if self.teacher_pretrain is None and self.changed("distill_coef"):
            raise ValueError("distill_coef is about a teacher: give --teacher_pretrain MODEL")
        return self
