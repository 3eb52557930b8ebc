"""`rlhf chat`: chat with one or more models in the terminal."""

from rlhf_cli.config.commands.chat import ChatConfig


def chat(config: ChatConfig) -> None:
    """Chat with a model in the terminal. Responses are streamed; /help lists the chat commands.

    PRETRAIN is a model, run directory, adapter or checkpoint. To compare models, separate them with commas. If stdin is
    not a terminal, each input line is a message, and only the responses are written to stdout.
    """
    from rlhf_cli.runs.chat.run import run_chat

    run_chat(config)
