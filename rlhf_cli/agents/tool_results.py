"""Tools and their results as the Model Context Protocol writes them, for the model: schemas and texts.

OpenEnv's servers use the same forms.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.agents.environment_object import as_text
from rlhf_cli.rewards.records import BadResult


def function_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool in OpenAI's form. Raises BadResult if it has no name or no parameters."""
    parameters = tool.get("inputSchema", tool.get("input_schema"))
    name = tool.get("name")
    if not isinstance(name, str) or not name or not isinstance(parameters, dict):
        raise BadResult(f"lists a tool without a name or a schema: {as_text(dict(tool))[:200]}")
    described = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": described}


def result_text(result: object) -> str:
    """Return the text of a tool's result: of its content if it has some, of an error as such."""
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return as_text(result)
    text = "\n".join(map(_block_text, result["content"]))
    structured = result.get("structuredContent", result.get("structured_content"))
    if not text and structured is not None:
        text = as_text(structured)
    return error_text(text) if result.get("isError", result.get("is_error")) else text


def error_text(message: str) -> str:
    """Return the observation of an error."""
    return message if message.startswith("Error") else f"Error: {message}"


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of schemas in OpenAI's form."""
    return [tool["function"]["name"] for tool in tools]


def _block_text(block: object) -> str:
    """Return the text of one part of a result; a mark for pictures and sound."""
    match block:
        case {"type": "text", "text": text}:
            return as_text(text)
        case {"type": "resource", "resource": {"text": text}}:
            return as_text(text)
        case {"type": "resource_link", "uri": uri}:
            return as_text(uri)
        case {"type": kind}:
            return f"[{kind}]"
    return as_text(block)
