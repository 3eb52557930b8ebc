"""`rlhf data`: preview how a command reads a dataset."""

from pydantic import model_validator

from rlhf_cli.command_table import POLICY_GRADIENT
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig
from rlhf_cli.config.inspection import ShowConfig, ShownDataConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.errors import listed


class DataCommandConfig(CommandConfig):
    """Preview how a command reads a dataset: format, examples with trained tokens, lengths, and dropped rows.

    Accepts the command's data settings and reports the same errors, but loads only the tokenizer. For online commands,
    DATASET replaces --prompt_data. With --environment, one episode is played.
    """

    unsupported = frozenset(
        {
            "model.param_dtype",
            "episodes.agent_command",
            "episodes.environment_num_workers",
            "episodes.turn_schedule",
        }
    )
    positional = "dataset"

    show: ShowConfig
    model: ModelSource
    data: ShownDataConfig
    template: TemplateConfig = TemplateConfig()
    pictures: PicturesConfig = PicturesConfig()
    episodes: EpisodeConfig = EpisodeConfig()

    @model_validator(mode="after")
    def _check_episodes_read_prompts(self) -> "DataCommandConfig":
        if self.episodes.environment is not None and self.show.for_ not in POLICY_GRADIENT:
            raise ValueError(
                "environment: an episode starts with a prompt for an online command: set --for "
                f"{listed(POLICY_GRADIENT, 'or')}"
            )
        return self
