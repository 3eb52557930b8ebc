"""`rlhf generate`: sample, score and select responses."""

from pydantic import model_validator

from rlhf_cli.commands.inference import OF_TRAINING, InferenceConfig
from rlhf_cli.config.generate import GenerateOutputConfig
from rlhf_cli.config.scoring import STEP_REWARDS


class GenerateConfig(InferenceConfig):
    """Sample responses to prompts, score them, and select training data: the best ones, or best-worst pairs."""

    unsupported = STEP_REWARDS | OF_TRAINING | {"out.write_pass_rate"}

    out: GenerateOutputConfig

    @model_validator(mode="after")
    def _check_selection_prompts(self) -> "GenerateConfig":
        if self.episodes.runs_programs and self.out.select != "none":
            raise ValueError(
                f"select {self.out.select} writes rows with the run's prompts, but an agent program writes its own: "
                "use the messages in samples.jsonl"
            )
        return self

    @model_validator(mode="after")
    def _check_selection_scores(self) -> "GenerateConfig":
        self.reward.require_model_to_normalize()
        if self.reward.is_given or not self.needs_scores:
            return self
        if self.out.select in ("best", "best_worst"):
            raise ValueError(f"select {self.out.select} compares scores: set a reward")
        raise ValueError("min_score requires scores: set a reward")
