"""The settings of `rlhf generate`."""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig, check_environment_reward
from rlhf_cli.config.generate import (
    GenerateOutputConfig,
    RewardPlacementConfig,
    SelectConfig,
)
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.presets import defaults_of_environment
from rlhf_cli.config.rollout import SYNC, EngineConfig, SamplingConfig
from rlhf_cli.config.scoring import SHAPING, STEP_REWARDS, RewardConfig


class GenerateConfig(CommandConfig):
    """Settings of `rlhf generate`."""

    unsupported = STEP_REWARDS | SHAPING | SYNC | {"episodes.turns"}

    model: ModelSource
    prompts: PromptConfig
    template: TemplateConfig = TemplateConfig()
    pictures: PicturesConfig = PicturesConfig()
    episodes: EpisodeConfig = EpisodeConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    placement: RewardPlacementConfig = RewardPlacementConfig()
    selection: SelectConfig = SelectConfig()
    out: GenerateOutputConfig

    @property
    def needs_scores(self) -> bool:
        """Whether answers without scores are of no use: scores select some of them."""
        return self.selection.select in ("best", "best_worst") or self.selection.min_score is not None

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return defaults_of_environment(given)

    @model_validator(mode="after")
    def _episodes_have_an_environment(self) -> "GenerateConfig":
        check_environment_reward(self.episodes, self.reward)
        return self

    @model_validator(mode="after")
    def _selection_has_prompts(self) -> "GenerateConfig":
        if self.episodes.agent_command is not None and self.selection.select != "none":
            raise ValueError(
                f"select {self.selection.select} writes rows with the run's prompts, and an agent program writes its "
                "own: take the messages from the file of responses"
            )
        return self

    @model_validator(mode="after")
    def _selection_has_scores(self) -> "GenerateConfig":
        self.reward.require_model_to_normalize()
        if self.reward.is_given or not self.needs_scores:
            return self
        if self.selection.select in ("best", "best_worst"):
            raise ValueError(f"select {self.selection.select} compares scores: give a reward")
        raise ValueError("min_score needs scores: give a reward")
