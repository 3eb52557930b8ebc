"""Episodes with the tools of a real MCP server: one process per episode, isolation, kills, and errors at startup."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scoring import is_alive, wait_until

from rlhf_cli.agents.mcp_server import McpServer
from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset
from rlhf_cli.agents.session_environments import SessionEnvironments
from rlhf_cli.backends.training.distributed_env import free_port
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.errors import UsageError

pytestmark = pytest.mark.usefixtures("no_process_is_left")

SERVER = '''
import os, sys, time
from mcp.server import MCPServer

server, kept = MCPServer("notes"), []

@server.tool()
def note(text: str) -> str:
    """Keep a text."""
    kept.append(text)
    return " ".join(kept)

@server.tool()
def number() -> int:
    """The number of this process."""
    return os.getpid()

@server.tool()
def fail(how: str) -> str:
    """Go wrong in some way."""
    if how == "raise":
        raise ValueError("a mood")
    if how == "exit":
        print("this is the end", file=sys.stderr, flush=True)
        os._exit(3)
    time.sleep(600)
    return ""

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run()
'''


def opened(command: str, *, timeout: float = 60.0) -> SessionEnvironments:
    return SessionEnvironments(f"mcp:{command}", McpServer(command), timeout=timeout, num_workers=8)


def ask(environments: SessionEnvironments, episode: int, action: Action) -> Reply:
    return asyncio.run(asyncio.wait_for(environments.answer(episode, action), 60))


def call(environments: SessionEnvironments, episode: int, *calls: ToolCall) -> Reply:
    return ask(environments, episode, Calls(calls))


def reset(environments: SessionEnvironments, count: int) -> list[Reply]:
    """Begin episodes at the same time."""

    async def replies() -> list[Reply]:
        return await asyncio.gather(*(environments.answer(number, Reset({}, number)) for number in range(count)))

    return asyncio.run(asyncio.wait_for(replies(), 60))


def note(text: str) -> ToolCall:
    return ToolCall("note", {"text": text})


def test_each_episode_has_a_server_of_its_own_which_dies_with_it(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(SERVER)
    with opened(f"{sys.executable} {tmp_path / 'notes.py'}") as environments:
        tools = {tool["function"]["name"]: tool["function"] for tool in environments.description.tools}
        assert sorted(tools) == ["fail", "note", "number"]
        assert tools["note"]["description"] == "Keep a text."
        assert tools["note"]["parameters"]["properties"]["text"]["type"] == "string"
        assert reset(environments, 4) == [Reply()] * 4
        assert call(environments, 0, note("a"), note("b")) == Reply(("a", "a b"))
        assert call(environments, 1, note("c")) == Reply(("c",))
        pids = [int(call(environments, i, ToolCall("number", {})).observations[0]) for i in range(4)]
        assert len(set(pids)) == 4
        wrong = call(environments, 0, ToolCall("fail", {"how": "raise"}), ToolCall("fly", {}), ToolCall("note", {}))
        assert wrong.failure is None
        assert all(text.startswith("Error") for text in wrong.observations)
        assert wrong.observations[0] == "Error executing tool fail"
        assert wrong.observations[1] == "Error: there is no tool 'fly'. Tools: note, number, fail"
        assert "text" in wrong.observations[2]

        ended = call(environments, 1, ToolCall("fail", {"how": "exit"}))
        assert ended.failure == "ended in fail: Connection closed; last stderr line: this is the end"
        assert call(environments, 1, note("d")) == ended
        os.kill(pids[2], signal.SIGKILL)
        assert (call(environments, 2, note("e")).failure or "").startswith("ended in note: Connection closed")
        assert ask(environments, 0, Finish()) == Reply(is_done=True)
        environments.end(0)
        wait_until(lambda: not is_alive(pids[0]))
        assert call(environments, 3, note("f")) == Reply(("f",))
        hanging = environments.answer(3, Calls((ToolCall("fail", {"how": "hang"}),)))  # killed when the block ends
        asyncio.run_coroutine_threadsafe(hanging, environments._thread.loop)
    assert not any(map(is_alive, pids))


FIRST_LINES = (
    "import json, sys, time\n"
    "for line in sys.stdin:\n"
    "    asked = json.loads(line)\n"
    "    if asked['method'] == 'tools/list':\n"
    "        result = {'tools': TOOLS}\n"
    "    elif asked['method'] == 'initialize':\n"
    "        result = {'protocolVersion': '2025-06-18', 'capabilities': {'tools': {}}, 'serverInfo': {'name': 'a', "
    "'version': '1'}}\n"
    "    elif asked['method'] == 'tools/call':\n"
    "        time.sleep(600)\n"
    "    elif 'id' in asked:\n"
    "        print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'error': {'code': -32601, 'message': 'no'}}), "
    "flush=True)\n"
    "        continue\n"
    "    else:\n"
    "        continue\n"
    "    print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'result': result}), flush=True)\n"
)
"""A minimal server with an older protocol version."""


def test_a_tool_that_hangs_is_killed_at_its_limit(tmp_path: Path) -> None:
    source = FIRST_LINES.replace("TOOLS", "[{'name': 'wait', 'inputSchema': {'type': 'object'}}]")
    (tmp_path / "old.py").write_text(source)
    with opened(f"{sys.executable} {tmp_path / 'old.py'}", timeout=5.0) as environments:
        assert ask(environments, 0, Reset({}, 0)) == Reply()
        late = Reply(failure="ran out of time (5 s) in wait", is_late=True)
        assert call(environments, 0, ToolCall("wait", {})) == late


def test_servers_that_do_not_work_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text(FIRST_LINES.replace("TOOLS", "[]"))
    (tmp_path / "broken.py").write_text("raise SystemExit('no key was given')")
    command = f"{sys.executable} {tmp_path}"
    with pytest.raises(UsageError, match=r"none.py has no tools$"), opened(f"{command}/none.py"):
        pass
    with (
        pytest.raises(UsageError, match=r"broken.py could not be started: .*; last stderr line: no key was given$"),
        opened(f"{command}/broken.py"),
    ):
        pass


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("nowhere-to-be-found server.py", "program 'nowhere-to-be-found' not found"),
        ("", 'has no command: use "mcp:python server.py", for example, or a URL'),
        (" ", 'has no command: use "mcp:python server.py", for example, or a URL'),
        ("python 'server.py", "No closing quotation"),
    ],
)
def test_commands_that_cannot_run_are_refused(command: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        McpServer(command)
    given = f"mcp:{command}:" if command.strip() else "mcp:"
    assert str(caught.value) == f"--environment {given} {sentence}"


def test_an_old_package_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_cli.agents.mcp_server.version", lambda name: "1.30.0")
    with pytest.raises(UsageError, match=r"requires mcp 2\.3, not 1\.30\.0: pip install 'rlhf-cli\[mcp\]'"):
        McpServer(sys.executable)


@contextmanager
def listening(path: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the server on a local port until the block ends."""
    process = subprocess.Popen([sys.executable, str(path), str(port)])
    try:
        wait_until(lambda: _answers(port))
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_by_http_has_a_session_an_episode_and_is_found_again_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(SERVER)
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    with listening(tmp_path / "notes.py", port), opened(url) as environments:
        assert environments.description.about == "MCP server with tools note, number, fail"
        assert reset(environments, 3) == [Reply()] * 3
        assert call(environments, 0, note("a")).observations == ("a",)
        assert call(environments, 1, ToolCall("fail", {"how": "exit"})).failure == "dropped the connection"
        assert call(environments, 0, note("b")).failure == "dropped the connection"
        environments.end(2)
        assert str(ask(environments, 2, Reset({}, 2)).failure).startswith("cannot be reached: ")
        with listening(tmp_path / "notes.py", port):
            environments.end(3)
            assert ask(environments, 3, Reset({}, 3)) == Reply()
            assert call(environments, 3, note("c")).observations == ("c",)


def test_a_server_by_http_gets_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ENVIRONMENT_API_KEY", "of-mine")
    assert McpServer("http://127.0.0.1:1/mcp").headers == {"Authorization": "Bearer of-mine"}
    assert McpServer(sys.executable).headers == {}


def test_a_server_by_http_that_is_not_there_is_refused_at_the_start() -> None:
    url = f"http://127.0.0.1:{free_port()}/mcp"
    with pytest.raises(UsageError, match=f"^--environment mcp:{url} cannot be reached: "), opened(url):
        pass
