"""Settings that the commands which answer prompts have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig, check_environment_reward
from rlhf_cli.config.generate import AnswersOutputConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.placement import PlacementConfig
from rlhf_cli.config.presets import defaults_of_environment, defaults_of_prompts
from rlhf_cli.config.roles import RewardRanksConfig
from rlhf_cli.config.rollout import SYNC, EngineConfig, SamplingConfig
from rlhf_cli.config.scoring import SHAPING, RewardConfig

OF_TRAINING = (
    SHAPING
    | SYNC
    | {"episodes.turns", "prompts.teacher_context_key"}
    | {f"placement.{name}" for name in PlacementConfig.model_fields if name != "colocate_all_models"}
    | {f"reward_ranks.{name}" for name in RewardRanksConfig.model_fields if name != "reward_num_gpus_per_node"}
)
"""Settings that no command without training supports."""


class InferenceConfig(CommandConfig):
    """Settings of a command that answers prompts. Each command lists what it does not support."""

    example = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --prompt_data openai/gsm8k:main --reward_funcs gsm8k "
        "--output runs/gsm8k_test --n_samples_per_prompt 4 --temperature 1.0 --max_new_tokens 512 --max_len 1024"
    )
    makes_figures: ClassVar[bool] = False
    """Whether the command's results are computed from scores."""

    model: ModelSource
    prompts: PromptConfig
    template: TemplateConfig = TemplateConfig()
    pictures: PicturesConfig = PicturesConfig()
    episodes: EpisodeConfig = EpisodeConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    placement: PlacementConfig = PlacementConfig()
    reward_ranks: RewardRanksConfig = RewardRanksConfig(reward_num_gpus_per_node=1)
    out: AnswersOutputConfig = AnswersOutputConfig()

    @property
    def needs_scores(self) -> bool:
        """Whether responses without scores are useless."""
        return self.makes_figures or self.out.select in ("best", "best_worst") or self.out.min_score is not None

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return defaults_of_prompts(given, "prompt_data") | defaults_of_environment(given)

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        check_environment_reward(self.episodes, self.reward)
        return self

    @model_validator(mode="after")
    def _check_judges(self) -> Self:
        if self.reward.compares_responses and self.sampling.n_samples_per_prompt == 1:
            raise ValueError(
                f"judge_method {self.reward.judge_method} compares responses to the same prompt: set "
                "n_samples_per_prompt above 1"
            )
        return self
