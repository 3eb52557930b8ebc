"""`rlhf data`: show how a command will read a data set, before anything trains."""

from rlhf_cli.config.commands.data import DataCommandConfig


def data(config: DataCommandConfig) -> None:
    """Show how a command will read a data set: format, examples with their trained parts, lengths, lost rows.

    The settings of the data are the settings of the command, which refuses the same rows with the same words. Only
    the tokenizer is loaded. For ppo, DATASET stands for its prompt_data.
    """
    from rlhf_cli.runs.data_preview import inspect_data
    from rlhf_cli.runs.data_view import show
    from rlhf_cli.tracking.terminal.console import LastingStream, open_console

    previews = inspect_data(config)
    show(previews, open_console(LastingStream(1)), command=config.show.for_)
