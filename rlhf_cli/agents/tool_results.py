"""Conversion of Model Context Protocol tools and results to schemas and text for the model.

OpenEnv servers use the same formats.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.agents.environment_object import as_text
from rlhf_cli.rewards.records import BadResult


def function_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool to an OpenAI schema. Raises BadResult if name or parameters are missing."""
    # MCP uses camel case; OpenEnv serializes the same models in snake case.
    parameters = tool.get("inputSchema", tool.get("input_schema"))
    name = tool.get("name")
    if not isinstance(name, str) or not name or not isinstance(parameters, dict):
        raise BadResult(f"lists a tool without a name or a schema: {as_text(dict(tool))[:200]}")
    described = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": described}


def result_text(result: object) -> str:
    """Convert a tool result to text: the content, else the structured content. Errors are marked."""
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return as_text(result)
    text = "\n".join(map(_block_text, result["content"]))
    structured = result.get("structuredContent", result.get("structured_content"))
    if not text and structured is not None:
        text = as_text(structured)
    return error_text(text) if result.get("isError", result.get("is_error")) else text


def error_text(message: str) -> str:
    """Mark text as an error."""
    return message if message.startswith("Error") else f"Error: {message}"


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tool names in OpenAI schemas."""
    return [tool["function"]["name"] for tool in tools]


def _block_text(block: object) -> str:
    """Convert a content block to text; images and audio become a placeholder such as `[image]`."""
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
