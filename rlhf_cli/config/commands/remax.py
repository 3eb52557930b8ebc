"""The settings of `rlhf remax`."""

from pydantic import model_validator

from rlhf_cli.config.commands.online import OnlineConfig
from rlhf_cli.config.teacher import learning_alone


class ReMaxConfig(OnlineConfig):
    """Settings of `rlhf remax`."""

    @model_validator(mode="after")
    def _greedy_responses_are_compared_with(self) -> "ReMaxConfig":
        if self.distils_alone:
            raise ValueError(
                f"greedy responses are compared by their reward, and only the teacher counts here: {learning_alone()}"
            )
        return self
