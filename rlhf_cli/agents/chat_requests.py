"""Parsing of OpenAI chat completion requests.

Parameters that cannot affect the agent are ignored; parameters that it relies on are rejected if unsupported. Sampling
parameters always come from the run, because turns sampled in any other way cannot be trained on.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from rlhf_cli.agents.chat_records import ChatRequest, Refused
from rlhf_cli.agents.tool_results import tool_names
from rlhf_cli.data.formats.conversations import Message, Role, Tool, ToolCall

_KNOWN = frozenset(
    (
        *("messages", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"),
        *("logprobs", "top_logprobs", "model", "user", "metadata", "store", "service_tier", "prediction"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    )
)
"""Fields that are read, or that do not affect the response. Other fields are ignored and logged once: sampling uses the
run's settings.
"""
# OpenAI's own limit for `n`.
_MOST_CHOICES = 128
_ROLES: dict[object, Role] = {
    **{"system": "system", "developer": "system"},
    **{"user": "user", "assistant": "assistant", "tool": "tool"},
}
_PLAIN: dict[str, tuple[object, ...]] = {
    "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "chat_template_kwargs": (None, {}),
    "echo": (None, False),
    **dict.fromkeys(("functions", "function_call", "audio", "web_search_options", "extra_body"), (None,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), (None,)),
    **dict.fromkeys(("chat_template", "documents", "mm_processor_kwargs", "truncate_prompt_tokens"), (None,)),
}
"""Accepted values for fields that an agent relies on. Any other value is rejected."""
# Excluded from the request identity: a retry may switch streaming on or off.
_HOW_SENT = ("stream", "stream_options")


def chat_request(body: object, *, is_first_try: bool) -> ChatRequest:
    """Parse a request body. Raises Refused if it is invalid or unsupported."""
    if not isinstance(body, dict):
        raise Refused("the request body must be a JSON object")
    for name, known in _PLAIN.items():
        if body.get(name) not in known:
            raise Refused(f"{name} {json.dumps(body[name])} is not supported: omit it", param=name)
    tools = _tools(body.get("tools"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with at least one message", param="messages")
    # A prefilled turn would mix text that the policy did not sample into the trained tokens.
    if isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        raise Refused(
            "the last message has the role assistant: prefilled turns are not supported; end with another role",
            param="messages",
        )
    return ChatRequest(
        _named(tuple(_message(entry, place) for place, entry in enumerate(messages)), tool_names(tools)),
        tools,
        n=_count(body, "n", most=_MOST_CHOICES) or 1,
        max_tokens=_count(body, "max_completion_tokens") or _count(body, "max_tokens"),
        stop=_stop(body.get("stop")),
        identity=_identity(body),
        is_first_try=is_first_try,
        logprobs=bool(body.get("logprobs")),
        ignored=tuple(name for name in body if name not in _KNOWN and name not in _PLAIN and body[name] is not None),
    )


def _identity(body: Mapping[str, Any]) -> str:
    asked = {name: value for name, value in body.items() if name not in _HOW_SENT}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _count(body: Mapping[str, Any], name: str, *, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        raise Refused(
            f"{name} must be an integer {f'from 1 to {most}' if most else 'of at least 1'}: {json.dumps(value)}",
            param=name,
        )
    return value


def _stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refused("stop must be a string or a list of strings", param="stop")
    for text in texts:
        _refuse_halves(text, "stop")
    return tuple(texts)


def _refuse_halves(value: object, name: str) -> None:
    """Raise Refused if a string contains a lone surrogate, which tokenizers cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused(f"{name} contains a lone surrogate (half a character)", param=name) from None


def _tools(value: object) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise Refused("tools must be a list", param="tools")
    _refuse_halves(value, "tools")
    return tuple(_tool(entry, place) for place, entry in enumerate(value))


def _tool(entry: object, place: int) -> Tool:
    """Parse a tool and add the keys that chat templates may read."""
    function = entry.get("function") if isinstance(entry, dict) and entry.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Refused(f"tools[{place}] must be a function with a name", param="tools")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties") or {}, dict):
        raise Refused(f"tools[{place}]: parameters must be a JSON schema", param="tools")
    defaults = {"description": "", "parameters": {"type": "object", "properties": {}}}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given | {key: defaults[key] for key in defaults if key not in given}}


def _message(entry: object, place: int) -> Message:
    where = f"messages[{place}]"
    role = _ROLES.get(entry.get("role")) if isinstance(entry, dict) and isinstance(entry.get("role"), str) else None
    if not isinstance(entry, dict) or role is None:
        raise Refused(f"{where} must have one of the roles {', '.join(map(str, _ROLES))}", param=where)
    calls = _calls(entry.get("tool_calls"), where) if role == "assistant" else ()
    content = _content(entry.get("content"), where)
    if content is None and role != "assistant":
        raise Refused(f"{where} with role {role} has no content", param=where)
    call_id = entry.get("tool_call_id") if role == "tool" else None
    if role == "tool" and not isinstance(call_id, str):
        raise Refused(f"{where} with role tool has no tool_call_id", param=where)
    return Message(role, content or "", calls, tool_call_id=call_id)


def _content(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(f"{where} has content other than text", param=where)
    return "".join(text for text in texts if text)


def _calls(value: object, where: str) -> tuple[ToolCall, ...]:
    if not isinstance(value, list | None):
        raise Refused(f"{where}: tool_calls must be a list", param=where)
    return tuple(_call(call, where) for call in value or ())


def _call(call: object, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where} has a tool call without a function name", param=where)
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{where} calls {function['name']}, but its arguments are not a JSON object", param=where)
    return ToolCall(function["name"], arguments, str(call["id"]) if call.get("id") else None)


def _named(messages: tuple[Message, ...], tools: Collection[str]) -> tuple[Message, ...]:
    """Add the tool name to each tool result."""
    # Only declared tools: a name that the model made up is model output and must not enter the template's own text.
    called = {call.id: call.name for message in messages for call in message.tool_calls if call.name in tools}
    return tuple(
        Message("tool", message.content, tool_call_id=message.tool_call_id, name=called.get(message.tool_call_id))
        if message.role == "tool"
        else message
        for message in messages
    )
