"""Message formats for chat templates. A trial rendering determines a template's format."""

import itertools
import json
from dataclasses import dataclass

from rlhf_cli.data.formats.conversations import Message, ToolCall
from rlhf_cli.data.reading.columns import REASONING_KEYS


@dataclass(frozen=True, slots=True)
class MessageForm:
    """A message format: call arguments as JSON text or object, content of messages with calls, and reasoning key.

    With `as_parts` the content is a list of parts, which some vision templates require; messages with images always
    use it.
    """

    arguments_as_text: bool
    no_content: str | None
    reasoning_key: str = REASONING_KEYS[0]
    as_parts: bool = False

    def entry(self, message: Message) -> dict[str, object]:
        """Return the template's message dict, without empty keys: templates test whether keys exist."""
        named = {"tool_call_id": message.tool_call_id, "name": message.name}
        entry: dict[str, object] = {"role": message.role, "content": message.content}
        entry |= {key: value for key, value in named.items() if value is not None}
        if message.reasoning:
            entry[self.reasoning_key] = message.reasoning
        # Some templates test the content of a message with calls for none, others for an empty text.
        if message.tool_calls:
            entry["content"] = message.content or self.no_content
            entry["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if self.as_parts or message.pictures:
            entry["content"] = _parts(message)
        return entry

    def _call(self, call: ToolCall) -> dict[str, object]:
        text = json.dumps(call.arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": text if self.arguments_as_text else call.arguments}
        return {"type": "function", "function": function, **({"id": call.id} if call.id is not None else {})}


def _parts(message: Message) -> list[dict[str, str]]:
    """Return a message's text and images as parts, in order."""
    if not message.pictures:
        return [{"type": "text", "text": message.content}]
    # Omit empty pieces: some templates write a line per part.
    first, *others = ([{"type": "text", "text": piece}] if piece else [] for piece in message.pieces)
    return first + [part for other in others for part in ({"type": "image"}, *other)]


MESSAGE_FORMS = tuple(itertools.starmap(MessageForm, itertools.product((False, True), (None, ""))))
