"""`rlhf data`: preview how a command reads a dataset."""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from rlhf_cli.command_table import POLICY_GRADIENT
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig
from rlhf_cli.config.inspection import RewardTestConfig, ShowConfig, ShownDataConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.presets import defaults_of_environment, defaults_of_prompts
from rlhf_cli.config.rewards import ENVIRONMENT
from rlhf_cli.config.scoring import SHAPING, STEP_REWARDS, RewardConfig
from rlhf_cli.errors import listed


class DataCommandConfig(CommandConfig):
    """Preview how a command reads a dataset: format, examples with trained tokens, lengths, and dropped rows.

    Accepts the command's data settings and reports the same errors, but loads only the tokenizer. For online commands,
    DATASET replaces --prompt_data. With --environment, one episode is played. With --rewards, the rewards are tested.
    With --contamination, the data are searched for benchmark prompts.
    """

    unsupported = (
        STEP_REWARDS
        | SHAPING
        | {
            "reward.reward_pretrain",
            "reward.reward_model_weight",
            "reward.normalize_reward",
            "model.param_dtype",
            "episodes.agent_command",
            "episodes.environment_num_workers",
            "episodes.turn_schedule",
        }
    )
    positional = "dataset"
    example = "openai/gsm8k:main --for grpo --pretrain Qwen/Qwen2.5-0.5B-Instruct --rewards --reward_funcs gsm8k"

    show: ShowConfig
    model: ModelSource
    data: ShownDataConfig
    template: TemplateConfig = TemplateConfig()
    pictures: PicturesConfig = PicturesConfig()
    episodes: EpisodeConfig = EpisodeConfig()
    test: RewardTestConfig = RewardTestConfig()
    reward: RewardConfig = RewardConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of the online command that the prompts are for."""
        if given.get("for") not in POLICY_GRADIENT:
            return {}
        defaults = defaults_of_environment(given)
        # The test of rewards scores text, not episodes.
        defaults.pop("reward_funcs", None)
        defaults |= defaults_of_prompts(given, "dataset")
        # A preview without a test of rewards refuses them.
        return {name: value for name, value in defaults.items() if name != "reward_funcs" or "rewards" in given}

    @model_validator(mode="after")
    def _check_episodes_read_prompts(self) -> "DataCommandConfig":
        if self.episodes.environment is not None and self.show.for_ not in POLICY_GRADIENT:
            raise ValueError(
                "environment: an episode starts with a prompt for an online command: set --for "
                f"{listed(POLICY_GRADIENT, 'or')}"
            )
        return self

    @model_validator(mode="after")
    def _check_results(self) -> "DataCommandConfig":
        if self.test.rewards and self.show.contamination is not None:
            raise ValueError("rewards and contamination are separate tests: set only one")
        if self.show.as_json and not self.test.rewards and self.show.contamination is None:
            raise ValueError("json prints the results of a test: set --rewards or --contamination")
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> "DataCommandConfig":
        if not self.test.rewards:
            return self
        if self.show.for_ not in POLICY_GRADIENT:
            raise ValueError(f"rewards: set --for {listed(POLICY_GRADIENT, 'or')}, which use rewards")
        if not self.reward.is_given:
            raise ValueError(
                "rewards: there is no reward to test: set --reward_funcs, --reward_func, --remote_rm_url or --judge"
            )
        if self.reward.compares_responses:
            raise ValueError(
                f"rewards: judge_method {self.reward.judge_method} compares responses, but the test scores them singly"
            )
        if self.reward.asks_environment:
            raise ValueError(
                f"rewards: {ENVIRONMENT} in reward_funcs scores episodes, not text: play one without --rewards"
            )
        return self
