"""Actions and replies as JSON, which travels between the driver and an episode's process, one value a line."""

import json
from dataclasses import asdict

from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset, Text
from rlhf_cli.data.formats.conversations import ToolCall


def action_line(action: Action) -> bytes:
    """Return an action as a line of JSON. Raises TypeError if a column of the row is no JSON."""
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
    """Return the action of a line."""
    kind, *values = json.loads(line)
    match kind:
        case "reset":
            return Reset(*values)
        case "calls":
            return Calls(tuple(ToolCall(name, arguments) for name, arguments in values[0]))
        case "text":
            return Text(*values)
        case _:
            return Finish()


def reply_line(reply: Reply) -> bytes:
    """Return a reply as a line of JSON."""
    return json.dumps(asdict(reply)).encode() + b"\n"


def read_reply(line: bytes) -> Reply:
    """Return the reply of a line."""
    values = json.loads(line)
    return Reply(**values | {"observations": tuple(values["observations"])})
