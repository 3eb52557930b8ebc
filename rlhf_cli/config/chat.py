"""The models, the template and the sampling of a conversation in the terminal."""

from typing import Annotated

from rlhf_cli.config.base import JsonObject, Needs
from rlhf_cli.config.data import RenderingConfig


class ChatTextConfig(RenderingConfig):
    """Conversation"""

    system_prompt: Annotated[str | None, Needs("apply_chat_template")] = None
    """System message at the start of the conversation."""
    apply_chat_template: bool = True
    """Render the conversation with the tokenizer's chat template; a model without one continues the text."""
    chat_template_kwargs: Annotated[JsonObject, Needs("apply_chat_template")] = "{}"
    """Variables of the chat template's own, as a JSON object: '{"enable_thinking": false}' of Qwen 3."""
    input_template: Annotated[str | None, Needs("apply_chat_template", (False,))] = None
    """Text around each message without a chat template, `{}` standing for it: 'User: {}\\nAssistant:'."""
