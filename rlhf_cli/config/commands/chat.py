"""The settings of `rlhf chat`."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.chat import ChatModelConfig, ChatSamplingConfig, ChatTextConfig


class ChatConfig(BaseModel):
    """Settings of `rlhf chat`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    positional: ClassVar[str] = "pretrain"

    model: ChatModelConfig
    text: ChatTextConfig = ChatTextConfig()
    sampling: ChatSamplingConfig = ChatSamplingConfig()
