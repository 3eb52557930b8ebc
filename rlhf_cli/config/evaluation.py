"""Settings for evaluation: models, scoring and output, and evaluation during online training."""

import shlex
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.vllm_args import HIGHEST_TEMPERATURE, Temperature


class EvaluatedModelConfig(ModelSource):
    """Model"""

    pretrain: str
    """Models: folders, run directories, checkpoints, adapters or Hugging Face names, separated by commas. In chat, all
    of them answer each message.
    """

    @property
    def names(self) -> list[str]:
        """Model names. An existing folder with a comma in its name is a single model."""
        if Path(self.pretrain).expanduser().exists():
            return [self.pretrain]
        return [name.strip() for name in self.pretrain.split(",") if name.strip()]

    @model_validator(mode="after")
    def _check_models_differ(self) -> "EvaluatedModelConfig":
        if not self.names:
            raise ValueError(f"pretrain {self.pretrain!r} lists no model")
        # Results are stored by model name, so names must be unique.
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"pretrain {self.pretrain} lists a model twice")
        return self


class StatisticsConfig(SettingsGroup):
    """Statistics"""

    k: list[int] = []
    """Sample counts for pass@k and maj@k. Default: n_samples_per_prompt if above 1."""
    pass_score: float | None = None
    """Minimum score of a correct response. Default: the first verifier in reward_funcs decides."""

    @model_validator(mode="after")
    def _check_k_values(self) -> "StatisticsConfig":
        # An empty list is allowed and selects the default.
        if min(self.k, default=1) < 1:
            raise ValueError(f"k must be at least 1, not {min(self.k)}")
        if len(set(self.k)) < len(self.k):
            raise ValueError("k lists a number twice")
        return self


HARNESSES = {"lm_eval": "lm_eval", "inspect": "inspect_ai"}
"""Modules of the evaluation packages that `tasks` can name: lm-evaluation-harness and Inspect."""


class TasksConfig(SettingsGroup):
    """Benchmark tasks"""

    tasks: str | None = None
    """Tasks of an evaluation package, which replace --prompt_data: lm_eval:gsm8k,arc_easy (lm-evaluation-harness) or
    inspect:FILE.py (Inspect; also inspect:inspect_evals/gsm8k).
    """
    tasks_args: Annotated[str, Needs("tasks")] = ""
    """More arguments of `lm_eval run` or `inspect eval`, such as "--num_fewshot 5 --limit 100"."""

    @property
    def harness(self) -> str:
        """Name of the package: a key of HARNESSES."""
        return str(self.tasks).partition(":")[0]

    @property
    def names(self) -> list[str]:
        """Names of the tasks."""
        return [name.strip() for name in str(self.tasks).partition(":")[2].split(",") if name.strip()]

    @property
    def words(self) -> list[str]:
        """Additional arguments."""
        return shlex.split(self.tasks_args)

    @model_validator(mode="after")
    def _check_names(self) -> "TasksConfig":
        if self.tasks is not None and (self.harness not in HARNESSES or not self.names):
            raise ValueError(f"tasks {self.tasks!r}: must be lm_eval:TASK,... or inspect:FILE.py,...")
        try:
            decided = next((word for word in self.words if word.split("=")[0] in _OF_THIS_PROGRAM), None)
        except ValueError as error:
            raise ValueError(f"tasks_args {self.tasks_args!r}: {error}") from None
        if decided is not None:
            raise ValueError(f"tasks_args: this program sets {decided}; remove it")
        return self


_OF_THIS_PROGRAM = {"--model", "-M", "--tasks", "--output_path", "--log_samples", "--log-dir", "--log-format"}
"""Arguments of the packages that select model, tasks and output."""


class EvaluationConfig(SettingsGroup):
    """Evaluation"""

    needs = Needs("eval_dataset")

    eval_dataset: str | None = None
    """Evaluation prompts, read like prompt_data. With several datasets, metrics are also reported per dataset."""
    eval_split: str = "train"
    """Split of the evaluation data, if its name contains none."""
    eval_max_samples: int | None = Field(None, gt=0)
    """Maximum number of rows to load from eval_dataset; all by default."""
    eval_steps: int = Field(-1, ge=-1)
    """Evaluate every N iterations, and once before training; -1 only before and after training."""
    eval_n_samples_per_prompt: int = Field(1, gt=0)
    """Responses per prompt in evaluations. With n, accuracy is avg@n, and pass@n and maj@n are reported."""
    eval_temperature: Temperature = Field(0.0, ge=0, le=HIGHEST_TEMPERATURE)
    """Sampling temperature in evaluations; 0 is greedy."""
    best_metric_key: str | None = None
    """Metric to maximize for the best model in <output>/best: eval/accuracy, eval/reward or eval/pass@n."""

    @property
    def metrics(self) -> list[str]:
        """Metrics that can select the best model."""
        samples = self.eval_n_samples_per_prompt
        return ["eval/accuracy", "eval/reward", *([f"eval/pass@{samples}"] if samples > 1 else [])]

    @model_validator(mode="after")
    def _check_samples_differ(self) -> "EvaluationConfig":
        if self.eval_temperature == 0 and self.eval_n_samples_per_prompt > 1:
            raise ValueError(
                "temperature 0 generates the same response each time: eval_n_samples_per_prompt "
                f"{self.eval_n_samples_per_prompt} requires an eval_temperature above 0"
            )
        return self

    @model_validator(mode="after")
    def _check_best_metric(self) -> "EvaluationConfig":
        # A wrong name would otherwise be noticed only after the first evaluation.
        if self.best_metric_key is not None and self.best_metric_key not in self.metrics:
            raise ValueError(f"best_metric_key {self.best_metric_key}: must be one of {', '.join(self.metrics)}")
        return self
