"""The settings of `rlhf data`."""

from pydantic import model_validator

from rlhf_cli.command_table import POLICY_GRADIENT
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.inspection import ShowConfig, ShownDataConfig, ShownEpisodeConfig
from rlhf_cli.config.model import TokenizerSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.errors import listed


class DataCommandConfig(CommandConfig):
    """Settings of `rlhf data`."""

    positional = "dataset"

    show: ShowConfig
    model: TokenizerSource
    data: ShownDataConfig
    pictures: PicturesConfig = PicturesConfig()
    episodes: ShownEpisodeConfig = ShownEpisodeConfig()

    @model_validator(mode="after")
    def _episodes_begin_with_prompts(self) -> "DataCommandConfig":
        if self.episodes.environment is not None and self.show.for_ not in POLICY_GRADIENT:
            raise ValueError(
                "environment: an episode begins with a prompt of an online command: give --for "
                f"{listed(POLICY_GRADIENT, 'or')}"
            )
        return self
