"""Environments at a resources server of NeMo Gym, over HTTP (nemo-gym 0.4.0, which is not a dependency).

A session is a cookie. POST /seed_session takes the row and begins an episode, and POST /TOOL takes the arguments of a
call. POST /verify takes the row with the episode, in the form of OpenAI's Responses API, and returns `{"reward": 1.0}`.

GymnasiumServer subclasses serve POST /reset and POST /step instead. Each step takes the row with one
turn, and returns an observation, results of calls and a reward.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rlhf_cli.agents.environment_object import number, unknown_tool
from rlhf_cli.agents.records import Action, Calls, EnvironmentDescription, Finish, Reply, Reset, Text
from rlhf_cli.agents.server_key import KEY_ADVICE, NEEDS_KEY, server_headers
from rlhf_cli.agents.session_environments import SessionFailed
from rlhf_cli.agents.tool_results import tool_names
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.errors import LONGEST_REASON
from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.remote.call import MAX_ANSWER_BYTES, CallFailed, connection_failure, read_answer

PARAMETERS = "responses_create_params"
"""Column with the request to the model: its messages (`input`) and tools."""
_SEED, _VERIFY = "/seed_session", "/verify"
_RESET, _STEP = "/reset", "/step"
# A FastAPI path such as /{path}, which may serve any tool.
_ANY_PATH = "/{"


class NemoGymServer:
    """A resources server at an http or https URL. The tools are those of `row`, the first one of the prompts."""

    def __init__(self, url: str, row: Mapping[str, Any]) -> None:
        """Read the tools. Raises UsageError if the API key is not valid in a header."""
        self.url = url.rstrip("/")
        self.headers = server_headers(url)
        self._row = row
        self.tools: tuple[dict[str, Any], ...] = ()
        self._has_steps = False

    async def describe(self) -> EnvironmentDescription:
        """Return the tools of the rows.

        Raises:
            SessionFailed: the server is unreachable, is no resources server, or lacks a tool.
            BadResult: the first row is not one of NeMo Gym, or has a tool that the server does not run.
        """
        self.tools = row_tools(self._row)
        async with aiohttp.ClientSession(headers=self.headers) as http:
            status, text = await request(http, "GET", f"{self.url}/openapi.json", None)
        paths = _paths(text) if status == 200 else {}
        if status in NEEDS_KEY:
            raise SessionFailed(f"answered with status {status}: {KEY_ADVICE}")
        names = tool_names(self.tools)
        self._has_steps = {_RESET, _STEP} <= paths.keys()
        if self._has_steps:
            about = f"tools {', '.join(names)}" if names else "text turns"
            return EnvironmentDescription(self.tools, f"NeMo Gym server with {about}")
        if not {_SEED, _VERIFY} <= paths.keys():
            raise SessionFailed("is not a resources server of NeMo Gym: /openapi.json does not list /verify or /step")
        missing = [name for name in names if f"/{name}" not in paths]
        if missing and not any(path.startswith(_ANY_PATH) for path in paths):
            raise SessionFailed(f"does not have the tool {missing[0]!r} of the first row")
        about = f"tools {', '.join(names)}" if names else "a reward for the first turn"
        return EnvironmentDescription(self.tools, f"NeMo Gym server with {about}", rewards_at_end=True)

    def session(self) -> "_NemoGymSession":
        """Create a session that is not open yet."""
        return _SteppedSession(self) if self._has_steps else _NemoGymSession(self)

    async def check_sessions(self, count: int) -> None:
        """Do nothing: a session is a cookie, and servers announce no limit."""


class _NemoGymSession:
    """One episode: the row, and the output so far as the Responses API has it."""

    def __init__(self, server: NemoGymServer) -> None:
        self._server = server
        self._http: aiohttp.ClientSession | None = None
        self._row: Mapping[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    async def answer(self, action: Action) -> Reply:
        """Answer an action. `Reset` begins the session; `Text` and `Finish` end it with the reward."""
        match action:
            case Reset():
                await self._begin(action.row, _SEED)
                return Reply()
            case Calls(calls, text):
                self._add_message(text)
                return await self._make_calls(calls)
            case Text(text) | Finish(text):
                self._add_message(text)
                return await self._verify()

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    async def _begin(self, row: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Open the connections, and send the row. Returns the server's answer."""
        if row_tools(row) != self._server.tools:
            raise SessionFailed("has one set of tools for all rows: this row has others than the first one")
        # unsafe: otherwise servers with an IP address have no cookies.
        jar = aiohttp.CookieJar(unsafe=True)
        self._http = aiohttp.ClientSession(headers=self._server.headers, cookie_jar=jar)
        self._row = row
        return _object(await self._post(path, row))

    async def _make_calls(self, calls: Sequence[ToolCall]) -> Reply:
        """Run calls one after another. In the output, the results follow all calls, as in NeMo Gym's agents."""
        names = self._add_calls(calls)
        results = [await self._call(one) for one in calls]
        for name, result in zip(names, results, strict=True):
            self._output.append({"type": "function_call_output", "call_id": name, "output": result})
        return Reply(tuple(results))

    def _add_calls(self, calls: Sequence[ToolCall]) -> list[str]:
        """Add calls to the output. Returns their names."""
        names = [f"call_{len(self._output) + place}" for place in range(len(calls))]
        for name, one in zip(names, calls, strict=True):
            called = {"name": one.name, "arguments": json.dumps(one.arguments), "call_id": name}
            self._output.append({"type": "function_call", **called})
        return names

    async def _call(self, call: ToolCall) -> str:
        """Run a tool. Returns the body of the response with any status, as agents of NeMo Gym do."""
        names = tool_names(self._server.tools)
        # Other names could be paths of the server, such as /verify.
        if call.name not in names:
            return unknown_tool(call.name, names)
        assert self._http is not None
        return (await request(self._http, "POST", f"{self._server.url}/{call.name}", call.arguments))[1]

    def _add_message(self, text: str) -> None:
        if text:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            name = f"msg_{len(self._output)}"
            message = {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": content}
            self._output.append(message)

    async def _verify(self) -> Reply:
        """End the episode with the server's reward."""
        answer = await self._post(_VERIFY, self._row_with(self._output))
        if (reward := _object(answer).get("reward")) is None:
            raise SessionFailed(f"returned no reward from /verify: {answer[:LONGEST_REASON]}")
        return Reply(("",), reward=number(reward, "reward of /verify"), is_done=True)

    def _row_with(self, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the row with a response that has this output."""
        response = {
            "id": "resp_0",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._row[PARAMETERS].get("tools") or [],
        }
        return {**self._row, "response": response}

    async def _post(self, path: str, body: Mapping[str, Any]) -> str:
        assert self._http is not None
        status, text = await request(self._http, "POST", f"{self._server.url}{path}", body)
        if status != 200:
            raise SessionFailed(f"answered with status {status} at {path}: {' '.join(text.split())[:LONGEST_REASON]}")
        return text


class _SteppedSession(_NemoGymSession):
    """One episode at a server with /reset and /step."""

    async def answer(self, action: Action) -> Reply:
        """Answer an action with a step of the server. A last action without text needs none."""
        calls: Sequence[ToolCall] = ()
        match action:
            case Reset():
                begun = await self._begin(action.row, _RESET)
                # A dialogue appends it to the last message of the row.
                return Reply((f"\n\n{text}",) if (text := begun.get("observation")) else ())
            case Finish(""):
                return Reply(is_done=True)
            case Calls(calls, text):
                pass
            case Text(text) | Finish(text):
                pass
        return await self._step(text, calls)

    async def _step(self, text: str, calls: Sequence[ToolCall]) -> Reply:
        before = len(self._output)
        self._add_message(text)
        names = self._add_calls(calls)
        written = await self._post(_STEP, self._row_with(self._output[before:]))
        answer = _object(written)
        if not {"reward", "terminated"} <= answer.keys():
            raise SessionFailed(f"returned no reward from /step: {written[:LONGEST_REASON]}")
        observation = answer.get("observation") or ""
        results = {found["call_id"]: found["output"] for found in (answer.get("info") or {}).get("tool_outputs", ())}
        found = [str(results.get(name, "")) for name in names] or [""]
        # A turn with calls has only their results, so that an observation joins the last one.
        found[-1] = "\n".join(filter(None, (found[-1], observation)))
        is_truncated = bool(answer.get("truncated"))
        return Reply(
            tuple(found),
            reward=number(answer["reward"], "reward of /step"),
            is_done=bool(answer["terminated"]) or is_truncated,
            is_truncated=is_truncated,
        )


async def request(
    http: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> tuple[int, str]:
    """Send a request and return status and text. Raises SessionFailed without a response."""
    try:
        # The caller's timeout applies, and a redirect would send the row to another server.
        async with http.request(
            method, url, json=body, allow_redirects=False, timeout=aiohttp.ClientTimeout()
        ) as response:
            content = await read_answer(response, MAX_ANSWER_BYTES)
    except aiohttp.ClientError as error:
        raise SessionFailed(str(connection_failure(error))) from None
    except CallFailed as error:
        raise SessionFailed(str(error)) from None
    return response.status, content.decode(errors="replace")


def row_tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row in the form of chat completions. Raises BadResult if it is not a row of NeMo Gym."""
    parameters = row.get(PARAMETERS)
    if not isinstance(parameters, dict):
        raise BadResult(f"needs rows of NeMo Gym, with the column {PARAMETERS!r}; the first row has {', '.join(row)}")
    return tuple(map(_function, parameters.get("tools") or ()))


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    match tool:
        case {"type": "function", "name": str(name), "parameters": dict(parameters)}:
            text = tool.get("description") or ""
            return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
    raise BadResult(f"runs tools of the type function only; a row has {json.dumps(tool)[:200]}")


def _paths(text: str) -> dict[str, Any]:
    paths = _object(text).get("paths")
    return paths if isinstance(paths, dict) else {}


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object, or {} for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
