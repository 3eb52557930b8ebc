"""Evaluation: which models, how responses count, the place of the figures; and evaluation during online training."""

from pathlib import Path

from pydantic import Field, model_validator

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.vllm_args import HIGHEST_TEMPERATURE, Temperature


class EvaluatedModelConfig(ModelSource):
    """Model"""

    pretrain: str
    """Models: local folders, run directories and checkpoints of this program, adapters, Hugging Face names; several are
    separated by commas, and in chat all answer every message."""

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


class StatisticsConfig(SettingsGroup):
    """Statistics"""

    k: list[int] = []
    """pass@k and maj@k for these numbers of samples; by default for n_samples_per_prompt if it is above 1."""
    pass_score: float | None = None
    """A response counts as right from this score on; by default by the first verifier of reward_funcs."""

    @model_validator(mode="after")
    def _numbers_of_samples(self) -> "StatisticsConfig":
        if min(self.k, default=1) < 1:
            raise ValueError(f"k counts samples: {min(self.k)} is less than 1")
        if len(set(self.k)) < len(self.k):
            raise ValueError("k names a number twice")
        return self


class EvaluationConfig(SettingsGroup):
    """Evaluation"""

    needs = Needs("eval_dataset")

    eval_dataset: str | None = None
    """Prompts to evaluate on, read like prompt_data; several data sets also count apart."""
    eval_split: str = "train"
    """Split of the evaluation data to read if the name gives none."""
    eval_max_samples: int = Field(100_000_000, gt=0)
    """Rows of eval_dataset read at most."""
    eval_steps: int = Field(-1, ge=-1)
    """Iterations between evaluations, the first one before any update; -1 only there and at the end."""
    eval_n_samples_per_prompt: int = Field(1, gt=0)
    """Responses to each prompt in an evaluation; of n, accuracy is avg@n, and there are pass@n and maj@n."""
    eval_temperature: Temperature = Field(0.0, ge=0, le=HIGHEST_TEMPERATURE)
    """Sampling temperature of evaluations; 0 takes the likeliest token."""
    best_metric_key: str | None = None
    """Metric whose largest value keeps the model in <output>/best: eval/accuracy, eval/reward, eval/pass@n."""

    @property
    def metrics(self) -> list[str]:
        """Metrics that may decide which model is best."""
        samples = self.eval_n_samples_per_prompt
        return ["eval/accuracy", "eval/reward", *([f"eval/pass@{samples}"] if samples > 1 else [])]

    @model_validator(mode="after")
    def _samples_differ(self) -> "EvaluationConfig":
        if self.eval_temperature == 0 and self.eval_n_samples_per_prompt > 1:
            raise ValueError(
                "temperature 0 gives the same response each time: eval_n_samples_per_prompt "
                f"{self.eval_n_samples_per_prompt} needs an eval_temperature above 0"
            )
        return self

    @model_validator(mode="after")
    def _best_can_be_told(self) -> "EvaluationConfig":
        if self.best_metric_key is not None and self.best_metric_key not in self.metrics:
            raise ValueError(f"best_metric_key {self.best_metric_key}: there are {', '.join(self.metrics)}")
        return self
