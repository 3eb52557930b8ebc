"""JSON encoding for actions and replies between the driver and an episode process, one value per line."""

import json
from dataclasses import asdict

from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset, Text
from rlhf_cli.data.formats.conversations import ToolCall


def action_line(action: Action) -> bytes:
    """Encode an action. Raises TypeError if a row column is not JSON-serializable."""
    match action:
        case Reset(row, seed):
            value: list[object] = ["reset", dict(row), seed]
        case Calls(calls):
            value = ["calls", [[call.name, dict(call.arguments)] for call in calls]]
        case Text(text):
            value = ["text", text]
        case Finish():
            value = ["finish"]
    return json.dumps(value).encode() + b"\n"


def read_action(line: bytes) -> Action:
    """Decode an action."""
    kind, *values = json.loads(line)
    match kind:
        case "reset":
            return Reset(*values)
        case "calls":
            # Call IDs and texts are not transferred: observations are matched to calls by order.
            return Calls(tuple(ToolCall(name, arguments) for name, arguments in values[0]))
        case "text":
            return Text(*values)
        case _:
            return Finish()


def reply_line(reply: Reply) -> bytes:
    """Encode a reply."""
    return json.dumps(asdict(reply)).encode() + b"\n"


def read_reply(line: bytes) -> Reply:
    """Decode a reply."""
    values = json.loads(line)
    # JSON has no tuples.
    return Reply(**values | {"observations": tuple(values["observations"])})
