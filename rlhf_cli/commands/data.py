"""`rlhf data`: preview how a command reads a dataset."""

from rlhf_cli.config.commands.data import DataCommandConfig


def data(config: DataCommandConfig) -> None:
    """Preview how a command reads a dataset: format, examples with trained tokens, lengths, and dropped rows.

    Accepts the command's data settings and reports the same errors, but loads only the tokenizer. For online commands,
    DATASET replaces --prompt_data. With --environment, one episode is played.
    """
    from rlhf_cli.runs.data_preview import inspect_data
    from rlhf_cli.runs.data_view import show
    from rlhf_cli.runs.episode_view import line_reader, show_episode
    from rlhf_cli.tracking.terminal.console import LastingStream, open_console

    previews, console = inspect_data(config), open_console(LastingStream(1))
    show(previews, console, command=config.show.for_)
    for preview in previews:
        if preview.rehearsal is not None:
            read_line = line_reader(console, has_script=config.episodes.turns is not None)
            show_episode(preview.rehearsal, console, special_tokens=preview.special_tokens, read_line=read_line)
