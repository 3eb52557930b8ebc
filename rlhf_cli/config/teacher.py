"""The teacher of on-policy distillation in an online run."""

from typing import Annotated

from pydantic import Field

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.command_table import COMMANDS, POLICY_GRADIENT
from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.errors import listed


def learning_alone() -> str:
    """Return the sentence that names the commands whose advantages need no reward, for messages of the others."""
    rows = {name: ESTIMATORS[COMMANDS[name].estimator] for name in POLICY_GRADIENT}
    names = [name for name, row in rows.items() if not row.critic and not row.greedy]
    return f"rlhf {listed(names)} learn from a teacher alone"


class TeacherConfig(SettingsGroup):
    """Teacher"""

    teacher_pretrain: str | None = None
    """Model that judges each token of the policy's own responses, alone or beside rewards: a folder, a run directory or
    a Hugging Face name; same token ids. With a teacher init_kl_coef is 0 by default, so there is no reference."""
    distill_coef: Annotated[float, Needs("teacher_pretrain")] = Field(1.0, gt=0)
    """Weight of the teacher: a token's advantage gets distill_coef times (teacher's log-prob less the policy's)."""

    @property
    def weight(self) -> float | None:
        """The weight of the teacher; None if there is no teacher."""
        return None if self.teacher_pretrain is None else self.distill_coef
