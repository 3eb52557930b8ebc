"""`rlhf data`: preview how a command reads a dataset."""

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.runs.data_preview import inspect_data
from rlhf_cli.runs.data_view import show
from rlhf_cli.runs.episode_view import line_reader, show_episode
from rlhf_cli.tracking.terminal.console import LastingStream, open_console


def show_data(config: DataCommandConfig) -> None:
    """Print a preview of each dataset. With an environment, one episode is played."""
    previews, console = inspect_data(config), open_console(LastingStream(1))
    show(previews, console, command=config.show.for_)
    for preview in previews:
        if preview.rehearsal is not None:
            read_line = line_reader(console, has_script=config.episodes.turns is not None)
            show_episode(preview.rehearsal, console, special_tokens=preview.special_tokens, read_line=read_line)
