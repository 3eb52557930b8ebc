"""Environments at an OpenEnv server, over WebSocket (openenv 0.10.0, which is not a dependency).

A session is a connection to /ws. Each request `{"type": "reset" | "step", "data": ...}` has one response: `{"type":
"observation", "data": {"observation", "reward", "done"}}` or `{"type": "error", "data": {"message", "code"}}`. The
action schema at /schema decides how turns become actions: as tool calls, or as one text field.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from rlhf_cli.agents.environment_object import ENDED, as_text, number, unknown_tool
from rlhf_cli.agents.openenv_connection import Connection, NotNow, Refused
from rlhf_cli.agents.records import Action, Calls, EnvironmentDescription, Finish, Reply, Reset, Text
from rlhf_cli.agents.server_key import KEY_ADVICE, NEEDS_KEY, server_headers
from rlhf_cli.agents.session_environments import SessionFailed
from rlhf_cli.agents.tool_results import error_text, function_schema, result_text, tool_names
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.errors import LONGEST_REASON
from rlhf_cli.rewards.remote.call import MAX_ANSWER_BYTES, CallFailed, connection_failure, read_answer
from rlhf_cli.rewards.workers.process import LOAD_LIMIT

CLOSING_SECONDS = 5.0
"""Seconds for the server to release sessions that have just been closed, before it counts as full."""

# The startup check opens thousands of sessions; more at a time would overflow the server's listen backlog.
_MAX_OPENING = 32
# OpenEnv's base classes add these to every action or observation.
_OWN_FIELDS = ("metadata", "done", "reward")
_CALL_FIELDS = {"type", "tool_name", "arguments"}


class OpenEnvServer:
    """An OpenEnv server at a ws, wss, http or https URL, with or without /ws at the end.

    A session must open within `timeout` seconds. Every request carries the API key, if set (`server_headers`).
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        self.timeout = timeout
        self._headers = server_headers(url)
        parts = urlsplit(url)
        secure = "s" if parts.scheme in ("wss", "https") else ""
        path = parts.path.rstrip("/").removesuffix("/ws")
        self.socket_url = urlunsplit((f"ws{secure}", parts.netloc, f"{path}/ws", parts.query, ""))
        self._schema_url = urlunsplit((f"http{secure}", parts.netloc, f"{path}/schema", parts.query, ""))
        self.field: str | None = None
        """Action field that receives the text of a turn, or None if the server has tools."""
        self.tools: list[str] = []

    async def describe(self) -> EnvironmentDescription:
        """Return the server's tools; a text server has none.

        Raises:
            SessionFailed: the server is unreachable, is no OpenEnv server, or needs actions that no model can write.
            BadResult: it lists an invalid tool.
        """
        self.field = text_field(await self._action_schema())
        if self.field is not None:
            return EnvironmentDescription((), f"OpenEnv server that reads the text of each turn as {self.field!r}")
        schemas = tuple(map(function_schema, await self._listed_tools()))
        self.tools = tool_names(schemas)
        return EnvironmentDescription(schemas, f"OpenEnv server with tools {', '.join(self.tools)}")

    def session(self) -> "_OpenEnvSession":
        """Create a session that is not open yet."""
        return _OpenEnvSession(self)

    def http_session(self) -> aiohttp.ClientSession:
        """Create an HTTP session that sends the API key."""
        return aiohttp.ClientSession(headers=self._headers)

    async def check_sessions(self, count: int) -> None:
        """Open `count` concurrent sessions and close them, to check the server's limit.

        The check gives up, without an error, if the server opens sessions too slowly.

        Raises:
            SessionFailed: the server rejects a session.
        """
        slots, num_open = asyncio.Semaphore(_MAX_OPENING), 0

        async def open_one(connection: Connection) -> None:
            nonlocal num_open
            async with slots:
                # An error response is fine here: it comes from an open session.
                with contextlib.suppress(SessionFailed):
                    await connection.begin("state", None, seconds=CLOSING_SECONDS)
            num_open += 1

        async with self.http_session() as http:
            connections = [Connection(http, self.socket_url) for _ in range(count)]
            tasks = [asyncio.create_task(open_one(connection)) for connection in connections]
            try:
                await asyncio.wait_for(asyncio.gather(*tasks), LOAD_LIMIT)
            except TimeoutError:
                # Slow is not full: each episode has a timeout for opening a session.
                return
            except NotNow as refusal:
                needed = f"a batch has {count:,} episodes at the same time"
                raise SessionFailed(f"has room for {num_open:,} sessions, and {needed}: {refusal}") from None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*(connection.close() for connection in connections))

    async def _action_schema(self) -> Mapping[str, Any]:
        try:
            async with (
                self.http_session() as http,
                http.get(self._schema_url, allow_redirects=False) as response,
            ):
                content = await read_answer(response, MAX_ANSWER_BYTES)
        except aiohttp.ClientError as error:
            raise SessionFailed(str(connection_failure(error))) from None
        except CallFailed as error:
            raise SessionFailed(str(error)) from None
        if response.status in NEEDS_KEY:
            raise SessionFailed(f"answered with status {response.status} at /schema: {KEY_ADVICE}")
        if response.status != 200:
            raise SessionFailed(f"answered with status {response.status} at /schema: it is not an OpenEnv server")
        # Any other JSON comes from a different kind of server.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            schema = json.loads(content)["action"]
            if isinstance(schema.get("properties", {}), dict):
                return dict(schema)
        raise SessionFailed("has no action schema at /schema: it is not an OpenEnv server")

    async def _listed_tools(self) -> Sequence[Mapping[str, Any]]:
        async with self.http_session() as http:
            connection = Connection(http, self.socket_url)
            try:
                await connection.open()
                data = await connection.ask("step", {"type": "list_tools"})
            except NotNow as error:
                raise SessionFailed(str(error)) from None
            finally:
                await connection.close()
        match data:
            case {"observation": {"tools": [_, *_] as tools}}:
                return [tool if isinstance(tool, dict) else {} for tool in tools]
            case {"observation": {"metadata": {"error": message}}}:
                raise SessionFailed(f"does not list its tools: {as_text(message)[:LONGEST_REASON]}")
        raise SessionFailed("has neither tools nor a text field in its actions")


def text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the action field that receives the text of a turn, or None if actions are tool calls.

    It is the only required field or, if no field is required, the only text field.

    Raises:
        SessionFailed: text cannot form such an action.
    """
    fields = {name: one for name, one in schema.get("properties", {}).items() if name not in _OWN_FIELDS}
    # OpenEnv's CallToolAction, or the generic Action, which declares no fields.
    if _CALL_FIELDS.issuperset(fields):
        return None
    texts = [name for name, one in fields.items() if isinstance(one, dict) and one.get("type") == "string"]
    needed = [name for name in schema.get("required", ()) if name in fields]
    possible = [name for name in needed or texts if name in texts]
    if len(possible) == 1 and len(needed) <= 1:
        return str(possible[0])
    raise SessionFailed(
        f"takes actions with the fields {', '.join(fields)}: supported are actions with one text field, and tool calls "
        "(CallToolAction)"
    )


class _OpenEnvSession:
    """One episode at an OpenEnv server."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._http: aiohttp.ClientSession | None = None
        self._connection: Connection | None = None
        # Whether any step had a numeric reward: null is no reward, not 0.
        self._has_reward = False

    async def answer(self, action: Action) -> Reply:
        """Answer an action."""
        match action:
            case Reset():
                return await self._reset({"seed": action.seed} | dict(action.row))
            case Calls(calls):
                return await self._make_calls(calls)
            case Text(text):
                assert self._server.field is not None
                return await self._step({self._server.field: text})
            case Finish():
                # The protocol has no request that ends an episode.
                return Reply(is_done=True)

    async def close(self) -> None:
        """Close the connection, which makes the server drop the environment."""
        if self._connection is not None:
            await self._connection.close()
        if self._http is not None:
            await self._http.close()

    async def _reset(self, arguments: Mapping[str, Any]) -> Reply:
        """Open the session, with retries while the server is full or restarting, and reset the environment."""
        self._http, seconds = self._server.http_session(), self._server.timeout
        self._connection = Connection(self._http, self._server.socket_url)
        try:
            reply = self._reply(await self._connection.begin("reset", arguments, seconds=seconds))
        except NotNow as error:
            raise SessionFailed(f"{error}; tried for {seconds:g} s") from None
        # An empty observation must not become an empty message after the prompt.
        return replace(reply, observations=tuple(filter(None, reply.observations)))

    async def _step(self, action: Mapping[str, Any]) -> Reply:
        """Send an action. If the server rejects it, the model receives the error."""
        assert self._connection is not None
        try:
            return self._reply(await self._connection.ask("step", action))
        except Refused as error:
            return Reply((error_text(str(error)),))

    async def _make_calls(self, calls: Sequence[ToolCall]) -> Reply:
        """Run calls one after another until the episode is done."""
        replies: list[Reply] = []
        for call in calls:
            if replies and replies[-1].is_done:
                replies.append(Reply((ENDED,), is_done=True))
            elif call.name not in self._server.tools:
                replies.append(Reply((unknown_tool(call.name, self._server.tools),)))
            else:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
                replies.append(await self._step(action))
        observations = tuple(text for reply in replies for text in reply.observations)
        return Reply(
            observations,
            reward=sum(reply.reward for reply in replies),
            is_done=replies[-1].is_done,
            lacks_reward=replies[-1].is_done and not self._has_reward,
        )

    def _reply(self, data: Mapping[str, Any]) -> Reply:
        """Convert a response to a reply with one observation. Raises BadResult if the reward is not a number.

        Servers may send rewards after each step or only at the end; null means none so far. If the server ends an
        episode without any reward, the reply lacks one. An earlier end, at a limit, leaves the reward so far.
        """
        reward = data.get("reward")
        gain = 0.0 if reward is None else number(reward, "reward of step")
        self._has_reward |= reward is not None
        is_done = bool(data.get("done"))
        return Reply(
            (observation_text(data.get("observation")),),
            reward=gain,
            is_done=is_done,
            lacks_reward=is_done and not self._has_reward,
        )


def observation_text(observation: object) -> str:
    """Convert an observation to text: a tool result, the only field if it is text, or the fields as JSON.

    Null fields and `metadata` are dropped.
    """
    match observation:
        case {"tool_name": _, "error": {"message": message}}:
            return error_text(as_text(message))
        case {"tool_name": _, **others}:
            return result_text(others.get("result"))
        case dict():
            shown = {name: one for name, one in observation.items() if name not in _OWN_FIELDS and one is not None}
            only = next(iter(shown.values()), "")
            return as_text(only if len(shown) <= 1 and isinstance(only, str) else shown)
    return as_text(observation)
