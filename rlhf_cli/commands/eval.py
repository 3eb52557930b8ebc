"""`rlhf eval`: evaluate one or more models on prompts with labels."""

from pydantic import model_validator

from rlhf_cli.commands.inference import OF_TRAINING, InferenceConfig
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.evaluation import EvaluatedModelConfig, StatisticsConfig, TasksConfig
from rlhf_cli.config.rewards import REWARDS
from rlhf_cli.config.rollout import EngineConfig, SamplingConfig

_WITH_TASKS = {"max_len", "seed", "output", "overwrite", *EngineConfig.model_fields} - {"vllm_num_engines"}
"""Settings that also apply to benchmark tasks, besides those of the model."""


class EvalConfig(InferenceConfig):
    """Evaluate models on prompts with labels: accuracy, pass@k and majority votes, with confidence intervals.

    With --tasks, run the tasks of lm-evaluation-harness or Inspect instead.
    """

    unsupported = OF_TRAINING | {"reward.prm_weight", "out.select", "out.min_score"}
    makes_figures = True

    model: EvaluatedModelConfig
    prompts: PromptConfig = PromptConfig(prompt_data="")
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    statistics: StatisticsConfig = StatisticsConfig()
    benchmark: TasksConfig = TasksConfig()

    @property
    def ks(self) -> list[int]:
        """Sample counts for pass@k and maj@k."""
        samples = self.sampling.n_samples_per_prompt
        return sorted(self.statistics.k) or ([samples] if samples > 1 else [])

    @model_validator(mode="after")
    def _check_tasks(self) -> "EvalConfig":
        if self.benchmark.tasks is None:
            if not self.prompts.prompt_data:
                raise ValueError("no prompts: set --prompt_data, or --tasks for benchmark tasks")
            return self
        # The package reads its own prompts, samples as its tasks say, and scores the responses.
        # Not the groups of a subclass, such as a plan.
        for group, field in EvalConfig.model_fields.items():
            names = () if group in ("model", "benchmark") else self.supported(group)
            settings, defaults = getattr(self, group), field.default
            changed = [name for name in names if getattr(settings, name) != getattr(defaults, name)]
            if useless := next((name for name in changed if name not in _WITH_TASKS), None):
                raise ValueError(f"{useless} has no effect on tasks, which {self.benchmark.harness} samples and scores")
        return self

    @model_validator(mode="after")
    def _check_reward(self) -> "EvalConfig":
        if self.benchmark.tasks is not None:
            return self
        if not self.reward.is_given:
            names = ", ".join(REWARDS)
            raise ValueError(
                f"no reward: set --reward_funcs ({names}), --reward_func FILE.py, "
                "--reward_pretrain MODEL, --remote_rm_url URL or --judge MODEL_OR_URL"
            )
        self.reward.require_model_to_normalize()
        return self

    @model_validator(mode="after")
    def _check_num_samples(self) -> "EvalConfig":
        samples = self.sampling.n_samples_per_prompt
        if max(self.ks, default=1) > samples:
            raise ValueError(f"k {max(self.ks)} exceeds n_samples_per_prompt {samples}")
        return self

    @model_validator(mode="after")
    def _check_correctness(self) -> "EvalConfig":
        if self.reward.has_verifier or self.statistics.pass_score is not None:
            return self
        for name, is_given in (
            ("k", self.statistics.k),
            ("write_pass_rate", self.out.write_pass_rate),
            ("prm_pretrain", self.reward.prm_pretrain),
        ):
            if is_given:
                raise ValueError(f"{name} counts correct responses: set a verifier in --reward_funcs, or --pass_score")
        return self

    @model_validator(mode="after")
    def _check_reranking(self) -> "EvalConfig":
        if self.reward.prm_pretrain is not None and not any(k > 1 for k in self.ks):
            raise ValueError("prm_pretrain selects among the samples for a prompt: set --n_samples_per_prompt above 1")
        return self

    @model_validator(mode="after")
    def _check_pass_rates(self) -> "EvalConfig":
        if self.out.write_pass_rate is not None and len(self.model.names) > 1:
            raise ValueError(f"write_pass_rate supports one model, but pretrain lists {len(self.model.names)}")
        return self
