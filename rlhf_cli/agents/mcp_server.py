"""Environments backed by MCP server tools: a stdio server process per episode, or an HTTP session.

The `mcp` package (2.x) is optional and imported when a server is started. A server does not see rows and has no reward.
"""

import contextlib
import importlib.util
import shlex
import shutil
import tempfile
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rlhf_cli.agents.environment_object import unknown_tool
from rlhf_cli.agents.records import Action, Calls, EnvironmentDescription, Finish, Reply, Reset, Text
from rlhf_cli.agents.server_key import server_headers
from rlhf_cli.agents.session_environments import SessionFailed
from rlhf_cli.agents.tool_results import error_text, function_schema, result_text, tool_names
from rlhf_cli.config.episodes import is_url
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.errors import LONGEST_REASON, UsageError, one_line

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport

# The end of a server's stderr, searched for the last line.
_TAIL_BYTES = 4096


class McpServer:
    """An MCP server: a command that each session starts and ends, or a URL (streamable HTTP).

    `url` is None for a command; `words` is empty for a URL.
    """

    def __init__(self, command: str) -> None:
        """Check the command.

        Raises:
            UsageError: `mcp` is not installed or too old, the executable does not exist, or the API key is not valid in
                a header.
        """
        if importlib.util.find_spec("mcp") is None:
            raise UsageError("--environment mcp: requires the mcp package: pip install 'rlhf-cli[mcp]'")
        # Packages for evaluations and environments install 1.x, which has other names.
        if (installed := version("mcp")).startswith("1."):
            raise UsageError(f"--environment mcp: requires mcp 2.3, not {installed}: pip install 'rlhf-cli[mcp]'")
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
            raise UsageError('--environment mcp: has no command: use "mcp:python server.py", for example, or a URL')
        if shutil.which(self.words[0]) is None:
            raise UsageError(f"--environment mcp:{command}: program {self.words[0]!r} not found")

    async def describe(self) -> EnvironmentDescription:
        """Start the server once and list the tools.

        Raises:
            SessionFailed: the server does not start, or has no tools.
            BadResult: it lists an invalid tool.
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

    def session(self) -> "_McpSession":
        """Create a session that is not open yet."""
        return _McpSession(self)

    async def check_sessions(self, count: int) -> None:
        """Do nothing: each command session has a separate process, and MCP does not announce a session limit."""


class _McpSession:
    """One episode: a server process with a connection, or an HTTP session."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._stack = AsyncExitStack()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - the session is its context
        self._stack.enter_context(self._errors)

    async def answer(self, action: Action) -> Reply:
        """Answer an action. `Reset` opens the session; calls run one after another."""
        match action:
            case Reset():
                self._client = await self._opened()
                return Reply()
            case Calls(calls):
                return Reply(tuple([await self._call(call) for call in calls]))
            case Text():
                raise SessionFailed("has tools and does not read text")
            case Finish():
                # The protocol has no request that ends an episode.
                return Reply(is_done=True)

    async def listed_tools(self) -> list[dict[str, Any]]:
        """Open the session and list the tools, from all pages."""
        client = await self._opened()
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def close(self) -> None:
        """End the session. `mcp` closes the process's stdin, then signals the process group after a grace period."""
        # Closing a broken connection raises the error that broke it, which was reported before.
        with contextlib.suppress(Exception):
            await self._stack.aclose()

    async def _opened(self) -> "Client":
        from mcp import Client

        try:
            return await self._stack.enter_async_context(Client(await self._transport()))
        except Exception as error:
            prefix = "could not be started" if self._server.url is None else "cannot be reached"
            raise SessionFailed(f"{prefix}: {self._last_words(error)}") from error

    async def _transport(self) -> "Transport":
        if self._server.url is None:
            from mcp import StdioServerParameters, stdio_client

            command, *arguments = self._server.words
            return stdio_client(StdioServerParameters(command=command, args=arguments), self._errors)
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        http = await self._stack.enter_async_context(create_mcp_http_client(self._server.headers))
        return streamable_http_client(self._server.url, http_client=http)

    async def _call(self, call: ToolCall) -> str:
        """Call a tool. Returns the result, or an error message for the model."""
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
        # `mcp` validates results, including against the tool's output schema, and raises these.
        except (RuntimeError, ValueError) as error:
            raise SessionFailed(f"violated the protocol in {call.name}: {one_line(error)}") from None
        return result_text(result.model_dump(mode="json", by_alias=True, exclude_none=True))

    def _last_words(self, error: BaseException) -> str:
        """Format an error together with the server's last stderr line."""
        # `mcp` connects in a task group, which wraps the error.
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._errors.seek(max(0, self._errors.seek(0, 2) - _TAIL_BYTES))
        lines = self._errors.read().split("\n")
        written = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{one_line(error)}{'; last stderr line: ' if written else ''}{written[:LONGEST_REASON]}"
