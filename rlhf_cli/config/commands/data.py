"""The settings of `rlhf data`."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.inspection import ShowConfig, ShownDataConfig
from rlhf_cli.config.model import TokenizerSource
from rlhf_cli.config.pictures import PicturesConfig


class DataCommandConfig(BaseModel):
    """Settings of `rlhf data`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    positional: ClassVar[str] = "dataset"

    show: ShowConfig
    model: TokenizerSource
    data: ShownDataConfig
    pictures: PicturesConfig = PicturesConfig()
