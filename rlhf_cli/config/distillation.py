"""The teacher of `rlhf distill` and `rlhf gkd`, and the divergence from it."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.train import ZeroStage


class DistillationConfig(SettingsGroup):
    """Distillation"""

    teacher_pretrain: str
    """Model to learn from: a local folder, a run directory of this program, or a Hugging Face name; same token ids."""
    teacher_offload: bool = False
    """Keep the teacher's weights in host memory while they are not used; a head of whole weights stays on the GPU."""
    beta: float = Field(0.0, ge=0, le=1)
    """Which divergence: 0 forward KL, KL(teacher || student); 1 reverse KL; between them the generalised Jensen-Shannon
    divergence of GKD."""
    teacher_top_k: int | None = Field(None, gt=0)
    """Compare the teacher's likeliest tokens only, so many, and all others as one; by default all tokens."""
    teacher_zero_stage: ZeroStage | None = None
    """Stage of the teacher, by default zero_stage; frozen weights are partitioned at 3 and whole at the others."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of both models' distributions in the divergence."""
    kd_coef: float = Field(1.0, gt=0, le=1)
    """Share of the divergence in the loss; the rest is the mean negative log-likelihood of the data, as in sft."""
    lmbda: float = Field(0.5, ge=0, le=1)
    """Share of the iterations that learn on the student's own responses; the others take responses of the data."""


class FixedRowsConfig(SettingsGroup):
    """Fixed responses"""

    dataset: str | None = None
    """Rows with responses for the iterations without own ones, read as by sft; by default the rows of prompt_data."""
    dataset_probs: Annotated[str | None, Needs("dataset")] = None
    """Share of each of several data sets in the mixture, separated by commas: 0.3,0.7; all rows of all if not given."""
    dataset_split: Annotated[str, Needs("dataset")] = "train"
    """Split to read if the name gives none."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """Treatment of rows longer than max_len; the number of them is always reported."""
    data_cache: str = "auto"
    """Folder with tokenised data for next runs; auto is ~/.cache/rlhf-cli/data for larger sets, off is none."""
    output_key: str | None = None
    """Column with the response; found by its name if not given."""
