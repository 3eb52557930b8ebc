"""Teacher for on-policy distillation in online runs."""

from typing import Annotated

from pydantic import Field

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.command_table import COMMANDS, POLICY_GRADIENT
from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.errors import listed


def learning_alone() -> str:
    """Return a sentence about commands that can train without a reward, for error messages of others."""
    rows = {name: ESTIMATORS[COMMANDS[name].estimator] for name in POLICY_GRADIENT}
    names = [name for name, row in rows.items() if not row.critic and not row.greedy]
    return f"rlhf {listed(names)} learn from a teacher alone"


class TeacherConfig(SettingsGroup):
    """Teacher"""

    teacher_pretrain: str | None = None
    """Teacher that scores each token of sampled responses, with or without rewards: a folder, a run directory, or a
    Hugging Face name. It must use the same token IDs. With a teacher, init_kl_coef defaults to 0, so no reference is
    loaded.
    """
    distill_coef: Annotated[float, Needs("teacher_pretrain")] = Field(1.0, gt=0)
    """Teacher weight: distill_coef * (teacher log-prob - policy log-prob) is added to each token's advantage."""

    @property
    def weight(self) -> float | None:
        """Teacher weight; None without a teacher."""
        return None if self.teacher_pretrain is None else self.distill_coef
