"""`rlhf generate`: sampled responses to prompts as JSON lines, scored and selected.

Leaves out what it does (generation.py) and everything heavy: importing this module costs settings only.
"""

from pydantic import BaseModel, ConfigDict, model_validator

from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.generate import (
    AnsweringModelConfig,
    GenerateOutputConfig,
    RewardPlacementConfig,
    SamplingConfig,
    SelectConfig,
)
from rlhf_cli.config.scoring import RemoteScoringConfig


class GenerateConfig(BaseModel):
    """Settings of `rlhf generate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: AnsweringModelConfig
    prompts: PromptConfig
    sampling: SamplingConfig = SamplingConfig()
    reward: RemoteScoringConfig = RemoteScoringConfig()
    placement: RewardPlacementConfig = RewardPlacementConfig()
    selection: SelectConfig = SelectConfig()
    out: GenerateOutputConfig

    @model_validator(mode="after")
    def _selection_has_scores(self) -> "GenerateConfig":
        if self.reward.is_given:
            return self
        if self.selection.select in ("best", "best_worst"):
            raise ValueError(f"select {self.selection.select} compares scores: give a reward")
        if self.selection.min_score is not None:
            raise ValueError("min_score needs scores: give a reward")
        return self


def generate(config: GenerateConfig) -> None:
    """Sample responses to prompts, score them, and select the best, or pairs of best and worst, for training."""
    from rlhf_cli.commands.generation import run_generation

    run_generation(config)
