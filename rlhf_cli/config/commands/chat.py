"""The settings of `rlhf chat`."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.chat import ChatModelConfig, ChatSamplingConfig, ChatTextConfig


class ChatConfig(CommandConfig):
    """Settings of `rlhf chat`."""

    positional = "pretrain"

    model: ChatModelConfig
    text: ChatTextConfig = ChatTextConfig()
    sampling: ChatSamplingConfig = ChatSamplingConfig()
