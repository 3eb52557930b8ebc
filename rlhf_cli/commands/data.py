"""`rlhf data`: how the rows of a data set will be read, before anything trains.

Leaves out what is read (inspection.py), how it looks (data_view.py) and everything heavy: importing this module costs
settings only.
"""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.inspection import ShowConfig, ShownDataConfig
from rlhf_cli.config.model import TokenizerSource


class DataCommandConfig(BaseModel):
    """Settings of `rlhf data`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    positional: ClassVar[str] = "dataset"

    show: ShowConfig
    model: TokenizerSource
    data: ShownDataConfig


def data(config: DataCommandConfig) -> None:
    """Show how a command will read a data set: format, examples with what is trained, lengths, what is cut or dropped.

    Settings of the data are those of the command, which refuses the same rows with the same words. Only the tokenizer
    is loaded. For ppo, DATASET stands for its prompt_data.
    """
    from rlhf_cli.commands.data_view import show
    from rlhf_cli.commands.inspection import inspect_data
    from rlhf_cli.tracking.terminal import LastingStream, open_console

    previews = inspect_data(config)
    show(previews, open_console(LastingStream(1)), command=config.show.for_)
