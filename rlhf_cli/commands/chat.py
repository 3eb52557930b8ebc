"""`rlhf chat`: a conversation with one or several models in the terminal."""

from rlhf_cli.config.commands.chat import ChatConfig


def chat(config: ChatConfig) -> None:
    """Talk to a model in the terminal: answers appear token by token, /help lists the commands.

    PRETRAIN is a model, a run directory, an adapter or a checkpoint; several, separated by commas, answer side by side.
    If standard input is no terminal, every line is a message, and standard output has the answers alone.
    """
    from rlhf_cli.runs.chat.run import run_chat

    run_chat(config)
