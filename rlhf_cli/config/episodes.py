"""Settings of episodes with an environment."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.rewards import ENVIRONMENT
from rlhf_cli.config.scoring import RequestScoringConfig


class EnvironmentConfig(SettingsGroup):
    """Environment"""

    environment: str | None = None
    """Python file with an environment, or FILE.py:NAME. A response is an episode of several turns then: public methods
    of the class are the model's tools, and step(text) answers a model without tools."""
    max_turns: int = Field(8, gt=0)
    """Turns of the model in an episode at most; max_new_tokens bounds a turn, and max_len the whole episode."""
    environment_timeout: float = Field(30.0, gt=0)
    """Seconds in which an environment has to answer a turn; then it is killed and the reward of its episode fails."""

    @property
    def num_workers(self) -> int:
        """Environments that work at the same time."""
        return 1

    def identity(self, *, max_len: int) -> dict[str, object]:
        """Return the settings that runs which are one have in common; a folder that moved holds the same file."""
        if self.environment is None:
            return {"environment": None, "max_turns": self.max_turns}
        return {"environment": Path(self.environment).name, "max_turns": self.max_turns, "max_len": max_len}

    @model_validator(mode="after")
    def _settings_belong_to_an_environment(self) -> Self:
        given = self.changed(*(name for name in type(self).model_fields if name != "environment"))
        if self.environment is None and given:
            raise ValueError(f"{given} is about episodes: give --environment FILE.py")
        return self


class EpisodeConfig(EnvironmentConfig):
    """Environment"""

    environment_num_workers: int = Field(32, gt=0)
    """Environments that work at the same time; the others wait."""

    @property
    def num_workers(self) -> int:
        """Environments that work at the same time."""
        return self.environment_num_workers


def check_environment_reward(episodes: EpisodeConfig, reward: RequestScoringConfig) -> None:
    """Raise ValueError if the reward of an environment is named and there is none."""
    if episodes.environment is None and any(call.name == ENVIRONMENT for call in reward.rewards):
        raise ValueError(f"reward_funcs {ENVIRONMENT} is the reward of an environment: give --environment FILE.py")
