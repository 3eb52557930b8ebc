"""Teacher and divergence settings for `rlhf distill` and `rlhf gkd`."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.teachers import ModelsBySource
from rlhf_cli.config.train import ZeroStage

NOT_OF_THE_LOSS = frozenset({"teacher_pretrain", "teacher_by_source", "teacher_zero_stage", "teacher_offload"})
"""Teacher settings that do not affect the objective; the model is identified by hashes."""


class DistillationConfig(SettingsGroup):
    """Distillation"""

    teacher_pretrain: str
    """Teacher model: a local folder, a run directory, or a Hugging Face name. It must use the student's token IDs,
    except with --teacher_tokenizer own.
    """
    teacher_by_source: ModelsBySource = None
    """Teachers for rows of some sources: {"code": "CODE_MODEL", "math_*": "MATH_MODEL"}. A row's source is its
    data_source, or else its dataset. All other rows use teacher_pretrain.
    """
    teacher_tokenizer: Literal["own"] | None = None
    """own: teachers read the text in their own tokens and chat templates, and are compared at positions and tokens that
    both tokenizers share. Default: the student's tokens, which must have the same IDs.
    """
    teacher_offload: bool = False
    """Offload idle teacher weights to host memory. An unpartitioned LM head stays on the GPU."""
    beta: float = Field(0.0, ge=0, le=1)
    """Interpolates the divergence: 0 is forward KL, KL(teacher || student); 1 is reverse KL; values in between are the
    generalized Jensen-Shannon divergence of GKD.
    """
    teacher_top_k: int | None = Field(None, gt=0)
    """Compare only the teacher's k most likely tokens, with all others merged into one. Default: all tokens."""
    teacher_zero_stage: ZeroStage | None = None
    """ZeRO stage of the teacher. Default: zero_stage. Frozen weights are partitioned only at stage 3."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of both distributions in the divergence."""
    kd_coef: float = Field(1.0, gt=0, le=1)
    """Weight of the divergence in the loss; the rest is the SFT loss, the mean negative log-likelihood of the data."""
    lmbda: float = Field(0.5, ge=0, le=1)
    """Fraction of iterations with responses sampled from the student. The others use dataset responses."""

    def check_whole_sequences(self) -> None:
        """Raise ValueError if the settings need whole sequences on each rank."""
        if given := self.changed("teacher_by_source", "teacher_tokenizer"):
            raise ValueError(
                f"{given} does not support sequence_parallel_size, because student and teachers would split different "
                "sequences: set --sequence_parallel_size 1"
            )


class FixedRowsConfig(SettingsGroup):
    """Fixed responses"""

    dataset: str | None = None
    """Dataset with responses for iterations without sampling, in a format of `rlhf sft`. Default: the rows of
    prompt_data.
    """
    dataset_probs: Annotated[str | None, Needs("dataset")] = None
    """Mixture probabilities of several datasets, separated by commas: 0.3,0.7. Default: use all rows of all
    datasets.
    """
    dataset_split: Annotated[str, Needs("dataset")] = "train"
    """Split to load, if the dataset name contains none."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """How to handle rows longer than max_len. Their number is always reported."""
    data_cache: str = "auto"
    """Cache folder for tokenized data. auto uses ~/.cache/rlhf-cli/data for large datasets; off disables caching."""
    output_key: str | None = None
    """Column with the response. Default: detected by name."""
