"""The forms in which chat templates take messages; a template is tried to learn its form."""

import itertools
import json
from dataclasses import dataclass

from rlhf_cli.data.formats.conversations import Message, ToolCall
from rlhf_cli.data.reading.columns import REASONING_KEYS


@dataclass(frozen=True, slots=True)
class MessageForm:
    """One form: call arguments as JSON text or as an object, the text beside calls, and the key of a thought.

    With `as_parts` the content is a list of parts, which templates of vision models read alone; the content of a
    message with pictures always is.
    """

    arguments_as_text: bool
    no_content: str | None
    reasoning_key: str = REASONING_KEYS[0]
    as_parts: bool = False

    def entry(self, message: Message) -> dict[str, object]:
        """Return the message as templates get it, without empty keys: templates test whether a key is there."""
        named = {"tool_call_id": message.tool_call_id, "name": message.name}
        entry: dict[str, object] = {"role": message.role, "content": message.content}
        entry |= {key: value for key, value in named.items() if value is not None}
        if message.reasoning:
            entry[self.reasoning_key] = message.reasoning
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
    """Return the texts of a message and its pictures, in order."""
    if not message.pictures:
        return [{"type": "text", "text": message.content}]
    first, *others = ([{"type": "text", "text": piece}] if piece else [] for piece in message.pieces)
    return first + [part for other in others for part in ({"type": "image"}, *other)]


MESSAGE_FORMS = tuple(itertools.starmap(MessageForm, itertools.product((False, True), (None, ""))))
