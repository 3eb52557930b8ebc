"""Tool calls in messages, and function descriptions in rows, in OpenAI format.

Templates render both (`templates`). ShareGPT's `function_call` is treated as text.
"""

import json
from dataclasses import replace
from typing import Any

from rlhf_cli.data.formats.conversations import Conversation, Role, Tool, ToolCall
from rlhf_cli.data.reading.json_cells import parsed, records
from rlhf_cli.data.reading.sources import Row

TOOLS_COLUMN = "tools"


def tool_calls_of(row: Row, number: int, role: Role, value: object) -> tuple[ToolCall, ...]:
    """Parse `tool_calls` of message `number`. Raises UsageError with row and reason."""
    # Arrow fills missing calls with nulls or empty lists.
    value = records(value)
    if not value:
        return ()
    if role != "assistant":
        raise row.error(f"message {number} from {role} has tool calls, which only assistant messages may have")
    if not isinstance(value, list):
        raise row.error(f"message {number} has tool_calls that are not a list: {value!r:.60}")
    return tuple(_tool_call(row, number, parsed(call)) for call in value)


def tools_of(row: Row) -> tuple[dict[str, object], ...]:
    """Parse the functions in the row's `tools` column: JSON schemas, as a list or JSON text; () without the column."""
    value = records(row.get(TOOLS_COLUMN))
    if not value:
        return ()
    if not isinstance(value, list):
        raise row.error(f"column {TOOLS_COLUMN!r} is not a list of functions but {value!r:.60}")
    return tuple(_tool(row, number, parsed(tool)) for number, tool in enumerate(value, start=1))


def with_tools(conversation: Conversation, tools: tuple[Tool, ...], row: Row) -> Conversation:
    """Add the environment's tools to the conversation. Raises RowFault if the row also has tools."""
    if not tools:
        return conversation
    if conversation.tools:
        raise row.error(f"column {TOOLS_COLUMN!r} has tools, but the environment defines its own")
    return replace(conversation, tools=tools)


def _tool_call(row: Row, number: int, call: Any) -> ToolCall:
    function = parsed(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise row.error(
            f"message {number} has the tool call {call!r:.60}, expected "
            '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        )
    arguments = parsed(function.get("arguments"))
    # Some models write no arguments for functions without parameters.
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        raise row.error(
            f"message {number} calls {function['name']} with arguments that are not a JSON object: {arguments!r:.60}"
        )
    try:
        json.dumps(arguments)
    except TypeError as error:  # bytes of Parquet
        raise row.error(
            f"message {number} calls {function['name']} with arguments that are not valid JSON: {error}"
        ) from None
    # Numeric ids become text, since templates concatenate them.
    call_id = call.get("id")
    return ToolCall(function["name"], arguments, str(call_id) if call_id else None)


def _tool(row: Row, number: int, tool: Any) -> dict[str, object]:
    """Wrap a function in the structure that templates expect."""
    function = parsed(tool.get("function", tool)) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise row.error(
            f"column {TOOLS_COLUMN!r} has {tool!r:.60} as tool {number}, expected "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    if isinstance(function.get("parameters"), str):  # as in Parquet, whose rows have one schema for all tools
        function = function | {"parameters": parsed(function["parameters"])}
    return tool | {"function": function} if "function" in tool else {"type": "function", "function": function}
