"""Evaluation: which models, how responses count, where the figures go."""

from pathlib import Path

from pydantic import model_validator

from rlhf_cli.config.base import Group
from rlhf_cli.config.generate import AnswersOutputConfig, OptionalRewardConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.online import REWARD_FUNCS


class EvaluatedModelConfig(ModelSource):
    """Model"""

    pretrain: str
    """Models: local folders, run directories of this program, Hugging Face names; several separated by commas."""

    @property
    def names(self) -> list[str]:
        """The models one by one; a folder with a comma in its name is one."""
        if Path(self.pretrain).expanduser().exists():
            return [self.pretrain]
        return [name.strip() for name in self.pretrain.split(",") if name.strip()]

    @model_validator(mode="after")
    def _models_differ(self) -> "EvaluatedModelConfig":
        if not self.names:
            raise ValueError(f"pretrain {self.pretrain!r} names no model")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"pretrain {self.pretrain} names a model twice")
        return self


class EvalRewardConfig(OptionalRewardConfig):
    """Reward"""

    @model_validator(mode="after")
    def _there_is_a_reward(self) -> "EvalRewardConfig":
        if not self.is_given:
            names = ", ".join(REWARD_FUNCS)
            raise ValueError(
                f"nothing to judge responses by: give --reward_funcs ({names}), --reward_func FILE.py or "
                "--reward_pretrain MODEL"
            )
        return self


class StatisticsConfig(Group):
    """Statistics"""

    k: list[int] = []
    """pass@k and maj@k for these numbers of samples; by default for n_samples_per_prompt where that is more than 1."""
    pass_score: float | None = None
    """A response counts as right from this score on; by default by the verdict of the first of reward_funcs."""

    @model_validator(mode="after")
    def _numbers_of_samples(self) -> "StatisticsConfig":
        if min(self.k, default=1) < 1:
            raise ValueError(f"k counts samples: {min(self.k)} is less than 1")
        if len(set(self.k)) < len(self.k):
            raise ValueError("k names a number twice")
        return self


class EvalOutputConfig(AnswersOutputConfig):
    """Output"""

    output: str | None = None
    """Folder for eval.json (the figures), samples.jsonl (every response with its verdict), settings and logs."""
    write_pass_rate: str | None = None
    """JSON lines with the rows of the prompts and their pass_rate, for --pass_rate_range; of a single model."""

    @model_validator(mode="after")
    def _there_is_something_to_continue(self) -> "EvalOutputConfig":
        if self.output is None and (self.load_checkpoint or self.overwrite):
            name = "load_checkpoint" if self.load_checkpoint else "overwrite"
            raise ValueError(f"{name} is about a folder from an earlier time: give --output")
        return self
