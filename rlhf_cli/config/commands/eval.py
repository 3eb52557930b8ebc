"""The settings of `rlhf eval`."""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig, check_environment_reward
from rlhf_cli.config.evaluation import EvalOutputConfig, EvaluatedModelConfig, StatisticsConfig
from rlhf_cli.config.generate import RewardPlacementConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.presets import defaults_of_environment
from rlhf_cli.config.rewards import REWARDS
from rlhf_cli.config.rollout import SYNC, EngineConfig, SamplingConfig
from rlhf_cli.config.scoring import SHAPING, RewardConfig


class EvalConfig(CommandConfig):
    """Settings of `rlhf eval`."""

    unsupported = SHAPING | SYNC | {"reward.prm_weight", "episodes.turns"}

    model: EvaluatedModelConfig
    prompts: PromptConfig
    template: TemplateConfig = TemplateConfig()
    pictures: PicturesConfig = PicturesConfig()
    episodes: EpisodeConfig = EpisodeConfig()
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    statistics: StatisticsConfig = StatisticsConfig()
    placement: RewardPlacementConfig = RewardPlacementConfig()
    out: EvalOutputConfig = EvalOutputConfig()

    @property
    def ks(self) -> list[int]:
        """The numbers of samples of pass@k and maj@k."""
        samples = self.sampling.n_samples_per_prompt
        return sorted(self.statistics.k) or ([samples] if samples > 1 else [])

    @property
    def needs_scores(self) -> bool:
        """Whether answers without scores are of no use: the figures are made of scores."""
        return True

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return defaults_of_environment(given)

    @model_validator(mode="after")
    def _there_is_a_reward(self) -> "EvalConfig":
        if not self.reward.is_given:
            names = ", ".join(REWARDS)
            raise ValueError(
                f"nothing to judge responses by: give --reward_funcs ({names}), --reward_func FILE.py, "
                "--reward_pretrain MODEL or --remote_rm_url URL"
            )
        self.reward.require_model_to_normalize()
        return self

    @model_validator(mode="after")
    def _episodes_have_an_environment(self) -> "EvalConfig":
        check_environment_reward(self.episodes, self.reward)
        return self

    @model_validator(mode="after")
    def _there_are_k_samples(self) -> "EvalConfig":
        samples = self.sampling.n_samples_per_prompt
        if max(self.ks, default=1) > samples:
            raise ValueError(f"k {max(self.ks)} is more than the samples there are: n_samples_per_prompt {samples}")
        return self

    @model_validator(mode="after")
    def _right_can_be_told_from_wrong(self) -> "EvalConfig":
        if self.reward.has_verifier or self.statistics.pass_score is not None:
            return self
        for name, is_given in (
            ("k", self.statistics.k),
            ("write_pass_rate", self.out.write_pass_rate),
            ("prm_pretrain", self.reward.prm_pretrain),
        ):
            if is_given:
                raise ValueError(
                    f"{name} counts right responses: name a verifier in --reward_funcs, or give --pass_score"
                )
        return self

    @model_validator(mode="after")
    def _there_is_a_choice(self) -> "EvalConfig":
        if self.reward.prm_pretrain is not None and not any(k > 1 for k in self.ks):
            raise ValueError("prm_pretrain chooses among the samples of a prompt: give --n_samples_per_prompt above 1")
        return self

    @model_validator(mode="after")
    def _pass_rates_are_of_one_model(self) -> "EvalConfig":
        if self.out.write_pass_rate is not None and len(self.model.names) > 1:
            raise ValueError(f"write_pass_rate is of a single model, and pretrain names {len(self.model.names)}")
        return self
