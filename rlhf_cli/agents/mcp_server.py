"""Environments that are the tools of an MCP server: one process of the server an episode, by its standard streams, or
one session with a server that runs already, by HTTP.

The package `mcp` (2.x) is optional, and imported when a server is started. A server knows nothing of rows, and gives no
reward.
"""

import contextlib
import importlib.util
import shlex
import shutil
import tempfile
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from rlhf_cli.agents.environment_object import unknown_tool
from rlhf_cli.agents.records import Calls, EnvironmentDescription, Reply, Reset, Text
from rlhf_cli.agents.server_key import server_headers
from rlhf_cli.agents.session_environments import SessionFailed
from rlhf_cli.agents.tool_results import error_text, function_schema, result_text, tool_names
from rlhf_cli.config.episodes import is_url
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.errors import LONGEST_REASON, UsageError, one_line

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport

_TAIL_BYTES = 4096  # of a server's error stream, in which its last line is looked for


class McpServer:
    """An MCP server as a command line, which each session starts anew and ends; or as a URL (streamable HTTP).

    `url` is None for a command, and `words` are empty for a URL.
    """

    def __init__(self, command: str) -> None:
        """Check the command.

        Raises:
            UsageError: the package is not installed, there is no such program, or no header can carry the server's key.
        """
        if importlib.util.find_spec("mcp") is None:
            raise UsageError("--environment mcp: needs the package mcp: pip install 'rlhf-cli[mcp]'")
        self.tools: list[str] = []
        self.words: list[str] = []
        self.url = command if is_url(command) else None
        self.headers = server_headers(command) if self.url is not None else {}
        if self.url is None:
            self._read(command)

    def _read(self, command: str) -> None:
        try:
            self.words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--environment mcp:{command}: {error}") from None
        if not self.words:
            raise UsageError(
                '--environment mcp: has no command behind it: give one like "mcp:python server.py", or a URL'
            )
        if shutil.which(self.words[0]) is None:
            raise UsageError(f"--environment mcp:{command}: there is no program {self.words[0]!r}")

    async def describe(self) -> EnvironmentDescription:
        """Start the server once and return its tools.

        Raises:
            SessionFailed: it does not start, or has no tools.
            BadResult: it lists tools that cannot be read.
        """
        session = self.session()
        try:
            schemas = tuple(map(function_schema, await session.listed_tools()))
        finally:
            await session.close()
        if not schemas:
            raise SessionFailed("has no tools")
        self.tools = tool_names(schemas)
        return EnvironmentDescription(schemas, f"MCP server with tools {', '.join(self.tools)}", has_rewards=False)

    def session(self) -> "McpSession":
        """Return a session that is not open yet."""
        return McpSession(self)

    async def check_sessions(self, count: int) -> None:
        """Pass: a session has a process of its own, or the protocol shows no limit of sessions."""


class McpSession:
    """One episode: a process of the server and the connection to it, or a session by HTTP."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._stack = AsyncExitStack()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - the session is its context
        self._stack.enter_context(self._errors)

    async def answer(self, action: Reset | Calls | Text) -> Reply:
        """Return the reply to an action: `Reset` opens the session, calls are made one after the other."""
        match action:
            case Reset():
                self._client = await self._opened()
                return Reply()
            case Calls(calls):
                return Reply(tuple([await self._call(call) for call in calls]))
            case Text():
                raise SessionFailed("has tools, and does not read texts")

    async def listed_tools(self) -> list[dict[str, Any]]:
        """Open the session and return its tools, of all pages."""
        client = await self._opened()
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def close(self) -> None:
        """End the session. A process ends by the end of its input, and after a grace by signals to its group."""
        with contextlib.suppress(Exception):  # a connection that broke cannot be closed in good order
            await self._stack.aclose()

    async def _opened(self) -> "Client":
        from mcp import Client

        try:
            return await self._stack.enter_async_context(Client(await self._transport()))
        except Exception as error:
            began = "could not be started" if self._server.url is None else "cannot be reached"
            raise SessionFailed(f"{began}: {self._last_words(error)}") from error

    async def _transport(self) -> "Transport":
        if self._server.url is None:
            from mcp import StdioServerParameters, stdio_client

            command, *arguments = self._server.words
            return stdio_client(StdioServerParameters(command=command, args=arguments), self._errors)
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        http = await self._stack.enter_async_context(create_mcp_http_client(self._server.headers))
        return streamable_http_client(self._server.url, http_client=http)

    async def _call(self, call: ToolCall) -> str:
        """Return the result of a call, or the error for the model."""
        if call.name not in self._server.tools:
            return unknown_tool(call.name, self._server.tools)
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            result = await self._client.call_tool(call.name, dict(call.arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise SessionFailed(f"ended in {call.name}: {self._last_words(error)}") from None
            return error_text(error.message)
        except (RuntimeError, ValueError) as error:  # the package checks results, against the tool's schema too
            raise SessionFailed(f"broke the protocol in {call.name}: {one_line(error)}") from None
        return result_text(result.model_dump(mode="json", by_alias=True, exclude_none=True))

    def _last_words(self, error: BaseException) -> str:
        """Return an error, and the last line that the server wrote to its error stream."""
        while isinstance(error, BaseExceptionGroup):  # of the tasks that connect to the process
            error = error.exceptions[0]
        self._errors.seek(max(0, self._errors.seek(0, 2) - _TAIL_BYTES))
        lines = self._errors.read().split("\n")
        written = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{one_line(error)}{'; its last line: ' if written else ''}{written[:LONGEST_REASON]}"
