"""Sessions with an OpenEnv server: isolated, concurrent, refused, slow, dead and restarted."""

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from episode_fakes import FakeDialogue
from openenv_like import TEXT_ACTION, TOOL_ACTION, Dead, Environment, InvalidAction, OpenEnvLike, RawAnswer, Stepped
from scoring import wait_until

from rlhf_cli.agents import openenv
from rlhf_cli.agents.openenv import OpenEnvServer, observation_text, text_field
from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset, Text
from rlhf_cli.agents.server_key import server_headers
from rlhf_cli.agents.session_environments import SessionEnvironments, SessionFailed
from rlhf_cli.data.formats.conversations import Message, ToolCall, plain_message
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import UsageError
from rlhf_cli.trainers.online.environment_player import EnvironmentPlayer
from rlhf_cli.trainers.online.multi_turn import EpisodeLimits, MultiTurnEngines
from rlhf_cli.trainers.online.rollout import generate


class Moods(Environment):
    """Remembers its texts; some texts change its behaviour."""

    async def reset(self, *, seed: int, name: str = "", **row: Any) -> Stepped:
        self.texts = [f"{name}{seed}"]
        return {"text": f"hello {name}" if name else "", "metadata": {"secret": 1}}, None, False

    async def step(self, action: dict[str, Any]) -> Stepped:
        text = action["message"]
        match text:
            case "raise":
                raise ValueError("a mood")
            case "hang":
                await asyncio.Event().wait()
            case "die":
                raise Dead
            case "junk":
                raise RawAnswer("no JSON")
            case "large":
                raise RawAnswer("x" * 5_000_000)
            case "refuse":
                raise InvalidAction("Input should have at most 3 letters")
            case "nan":
                return {"text": ""}, float("nan"), False
        self.texts.append(text)
        return {"text": " ".join(self.texts)}, 0.5, text == "end"


def opened(server: OpenEnvLike, *, timeout: float = 30.0, num_workers: int = 64) -> SessionEnvironments:
    provider = OpenEnvServer(server.url, timeout=timeout)
    return SessionEnvironments(server.url, provider, timeout=timeout, num_workers=num_workers)


def ask(environments: SessionEnvironments, episode: int, action: Action) -> Reply:
    return asyncio.run(asyncio.wait_for(environments.answer(episode, action), 30))


def sent(environments: SessionEnvironments, episode: int, action: Action) -> "Future[Reply]":
    """Send an action, without waiting for the reply."""
    return asyncio.run_coroutine_threadsafe(environments.answer(episode, action), environments._thread.loop)


def test_a_session_gets_the_row_the_seed_and_the_turns_and_gives_rewards() -> None:
    with OpenEnvLike(Moods) as server, opened(server) as environments:
        assert environments.description.tools == ()
        assert ask(environments, 7, Reset({"name": "ann", "other": [1]}, 4)) == Reply(("hello ann",))
        assert ask(environments, 8, Reset({}, 5)) == Reply()
        assert ask(environments, 7, Text("one")) == Reply(("ann4 one",), reward=0.5)
        assert ask(environments, 7, Finish()) == Reply(is_done=True)
        assert ask(environments, 8, Text("end")) == Reply(("5 end",), reward=0.5, is_done=True)
        assert server.num_sessions == 2
        environments.end(7)
        wait_until(lambda: server.num_sessions == 1)
        assert ask(environments, 8, Reset({"seed": 1}, 5)) == Reply()
        assert ask(environments, 8, Text("new")).observations == ("1 new",)
    wait_until(lambda: server.num_sessions == 0)


@pytest.mark.parametrize(
    ("mood", "failure"),
    [
        ("raise", "answered with EXECUTION_ERROR: a mood"),
        ("die", "closed the connection (code 1006)"),
        ("junk", "sent a message that is not an observation: no JSON"),
        ("large", "dropped the connection"),
        ("nan", "has the reward of step 'nan', which is not a finite number"),
    ],
)
def test_a_session_that_breaks_fails_alone_and_for_good(mood: str, failure: str) -> None:
    with OpenEnvLike(Moods) as server, opened(server) as environments:
        for episode in (0, 1):
            ask(environments, episode, Reset({}, episode))
        first = ask(environments, 0, Text(mood))
        assert first.failure is not None
        assert first.failure.startswith(failure)
        assert ask(environments, 0, Text("again")) == first
        assert ask(environments, 1, Text("fine")).observations == ("1 fine",)


def test_a_server_that_hangs_fails_the_episode_at_its_limit() -> None:
    with OpenEnvLike(Moods) as server, opened(server, timeout=0.5) as environments:
        ask(environments, 0, Reset({}, 0))
        assert ask(environments, 0, Text("hang")).failure == "ran out of time (0.5 s) in step"


def test_an_action_that_the_server_refuses_is_an_error_for_the_model() -> None:
    with OpenEnvLike(Moods) as server, opened(server) as environments:
        ask(environments, 0, Reset({}, 0))
        error = "Error: message: Input should have at most 3 letters"
        assert ask(environments, 0, Text("refuse")) == Reply((error,))
        assert ask(environments, 0, Text("yes")).observations == ("0 yes",)


class Meeting(Environment):
    """A step ends once enough sessions wait at `barrier`."""

    barrier: asyncio.Barrier
    at_work = 0
    most = 0

    async def reset(self, *, seed: int, **row: Any) -> Stepped:
        self.seed = seed
        return {"text": ""}, None, False

    async def step(self, action: dict[str, Any]) -> Stepped:
        Meeting.at_work += 1
        Meeting.most = max(Meeting.most, Meeting.at_work)
        await self.barrier.wait()
        Meeting.at_work -= 1
        return {"text": str(self.seed)}, float(self.seed), False


@pytest.mark.parametrize("num_workers", [50, 5])
def test_fifty_sessions_are_open_and_num_workers_of_them_are_asked_at_once(num_workers: int) -> None:
    Meeting.barrier, Meeting.at_work, Meeting.most = asyncio.Barrier(num_workers), 0, 0
    with OpenEnvLike(Meeting) as server, opened(server, num_workers=num_workers) as environments:
        for reply in [sent(environments, episode, Reset({}, episode)) for episode in range(50)]:
            reply.result(30)
        assert server.num_sessions == 50
        replies = [sent(environments, episode, Text("go")) for episode in range(50)]
        assert [reply.result(30).reward for reply in replies] == [*map(float, range(50))]
        assert Meeting.most == num_workers


def test_an_episode_waits_for_a_session_that_becomes_free() -> None:
    with OpenEnvLike(Moods, max_sessions=1) as server, opened(server) as environments:
        ask(environments, 0, Reset({"name": "a"}, 0))
        reply = sent(environments, 1, Reset({"name": "b"}, 1))
        with pytest.raises(TimeoutError):
            reply.result(0.3)
        environments.end(0)
        assert reply.result(30) == Reply(("hello b",))


def test_an_episode_without_a_session_fails_at_its_limit() -> None:
    # Long enough that a busy machine opens the first session in time.
    with OpenEnvLike(Moods, max_sessions=1) as server, opened(server, timeout=3) as environments:
        assert ask(environments, 0, Reset({}, 0)).failure is None
        assert ask(environments, 1, Reset({}, 1)).failure == (
            "has no free session: Server at capacity: 1/1 sessions active (raise its max_concurrent_envs); "
            "tried for 3 s"
        )


def test_a_server_with_fewer_sessions_than_a_batch_has_episodes_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openenv, "CLOSING_SECONDS", 0.3)
    with OpenEnvLike(Moods, max_sessions=3) as server, opened(server) as environments:
        environments.check_sessions(3)
        assert server.most_sessions == 3
        wait_until(lambda: server.num_sessions == 0)
        with pytest.raises(UsageError) as caught:
            environments.check_sessions(8)
        assert str(caught.value) == (
            f"--environment {server.url} has room for 3 sessions, and a batch has 8 episodes at the same time: has no "
            "free session: Server at capacity: 3/3 sessions active (raise its max_concurrent_envs)"
        )
        wait_until(lambda: server.num_sessions == 0)


def test_a_session_that_is_still_closing_does_not_count_as_taken() -> None:
    with OpenEnvLike(Moods, max_sessions=1) as server, opened(server) as environments:
        ask(environments, 0, Reset({}, 0))
        threading.Timer(0.3, environments.end, [0]).start()
        environments.check_sessions(1)


def test_a_server_gets_the_key_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with OpenEnvLike(Moods, key="of-mine") as server:
        with pytest.raises(UsageError, match=r"401 at /schema: the server requires an API key: .* RLHF_ENVIRONMENT"):
            opened(server).__enter__()
        monkeypatch.setenv("RLHF_ENVIRONMENT_API_KEY", "of-mine")
        with opened(server) as environments:
            environments.check_sessions(2)
            assert ask(environments, 0, Reset({"name": "ann"}, 0)).failure is None


def test_the_key_of_hugging_face_goes_to_its_spaces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_ENVIRONMENT_API_KEY", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert server_headers("https://user-space.hf.space/ws") == {"Authorization": "Bearer hf_secret"}
    others = (
        "ws://user-space.hf.space",
        "wss://hf.space.example.org",
        "wss://evil-hf.space.org",
        "ws://localhost:8000",
    )
    assert [server_headers(url) for url in others] == [{}] * 4
    monkeypatch.setenv("RLHF_ENVIRONMENT_API_KEY", "own")
    assert server_headers("wss://user-space.hf.space") == {"Authorization": "Bearer own"}
    monkeypatch.setenv("RLHF_ENVIRONMENT_API_KEY", "own\nHost: x")
    with pytest.raises(UsageError, match="the key in RLHF_ENVIRONMENT_API_KEY must be printable"):
        server_headers("ws://localhost:8000")


def test_a_server_that_died_fails_its_episodes_and_is_found_again_at_the_next() -> None:
    with OpenEnvLike(Moods) as server, opened(server) as environments:
        ask(environments, 0, Reset({}, 0))
        server.kill()
        failure = ask(environments, 0, Text("one")).failure
        assert failure == "closed the connection (code 1006)"
        reply = sent(environments, 1, Reset({"name": "ann"}, 0))
        with pytest.raises(TimeoutError):
            reply.result(0.2)
        with OpenEnvLike(Moods, port=server.port):
            assert reply.result(30) == Reply(("hello ann",))


def test_idle_sessions_answer_pings() -> None:
    with OpenEnvLike(Moods) as server, opened(server) as environments:
        ask(environments, 0, Reset({}, 0))
        server.ping()
        wait_until(lambda: server.num_pongs == 1)


class Rewards(Environment):
    """Returns the reward that a turn names, and is done after `end`."""

    async def reset(self, **row: Any) -> Stepped:
        return {"text": ""}, None, False

    async def step(self, action: dict[str, Any]) -> Stepped:
        name, _, end = action["message"].partition(" ")
        return {"text": name}, None if name == "null" else float(name), bool(end)


@pytest.mark.parametrize(
    ("turns", "rewards", "lacks_reward"),
    [
        (("null", "null end"), [0.0, 0.0], True),  # a missing reward is not 0
        (("null", "0 end"), [0.0, 0.0], False),
        (("0.5", "null end"), [0.5, 0.0], False),
        (("null", "null"), [0.0, 0.0], False),  # not the last turn: no reward yet
    ],
)
def test_an_episode_that_ends_with_null_in_all_steps_lacks_its_reward(
    turns: tuple[str, ...], rewards: list[float], lacks_reward: bool
) -> None:
    with OpenEnvLike(Rewards) as server, opened(server) as environments:
        ask(environments, 0, Reset({}, 0))
        replies = [ask(environments, 0, Text(turn)) for turn in turns]
    assert [reply.failure for reply in replies] == [None, None]
    assert [reply.reward for reply in replies] == rewards
    assert [reply.lacks_reward for reply in replies] == [False, lacks_reward]


class Tools(Environment):
    """Checks a submitted sum."""

    async def reset(self, *, answer: int, **row: Any) -> Stepped:
        self.answer = answer
        return {"metadata": {"status": "ready"}}, None, False

    async def step(self, action: dict[str, Any]) -> Stepped:
        if action["type"] == "list_tools":
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            tools = [{"name": name, "description": f"to {name}", "input_schema": schema} for name in ("add", "submit")]
            return {"tools": tools, "metadata": {}}, None, False
        name, arguments = action["tool_name"], action["arguments"]
        if "a" not in arguments:
            error = {"error_type": "invalid_args", "message": "a is missing"}
            return {"tool_name": name, "result": None, "error": error}, None, False
        if name == "submit":
            return {"tool_name": name, "result": "done", "error": None}, float(arguments["a"] == self.answer), True
        content = [{"type": "text", "text": str(arguments["a"] + 1)}, {"type": "image", "data": "AAAA"}]
        return {"tool_name": name, "result": {"content": content, "is_error": False}, "error": None}, 0.25, False


@pytest.mark.parametrize("action", [TOOL_ACTION, {"properties": {"metadata": {}}, "title": "Action"}])
def test_tools_of_a_server_are_listed_and_called(action: dict[str, Any]) -> None:
    with OpenEnvLike(Tools, action=action) as server, opened(server) as environments:
        functions = [tool["function"] for tool in environments.description.tools]
        assert [one["name"] for one in functions] == ["add", "submit"]
        assert functions[0]["description"] == "to add"
        assert functions[0]["parameters"]["properties"] == {"a": {"type": "integer"}}
        assert ask(environments, 0, Reset({"answer": 3}, 0)) == Reply()
        calls = (ToolCall("add", {"a": 2}), ToolCall("add", {}), ToolCall("fly", {}), ToolCall("add", {"a": 1}))
        assert ask(environments, 0, Calls(calls)) == Reply(
            ("3\n[image]", "Error: a is missing", "Error: there is no tool 'fly'. Tools: add, submit", "2\n[image]"),
            reward=0.5,
        )
        assert ask(environments, 0, Calls((ToolCall("submit", {"a": 3}), ToolCall("add", {"a": 1})))) == Reply(
            ("done", "Error: the episode has ended."), reward=1.0, is_done=True
        )


class SeededEngines:
    """Writes a letter that depends on the seed; turns can be returned in reverse order."""

    def __init__(self, *, backwards: bool) -> None:
        self._backwards = backwards
        self._left: list[tuple[int, Generation]] = []

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        texts = [[ord("a") + request.seed % 26] for request in requests]
        self._left = [(number, Generation(ids, [-1.0], "stop", 0)) for number, ids in enumerate(texts)]

    @property
    def is_generating(self) -> bool:
        return bool(self._left)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        return [self._left.pop(-1 if self._backwards else 0)]


def played(
    engines: SeededEngines, environments: SessionEnvironments, requests: list[GenerationRequest]
) -> list[Generation]:
    """Play an episode for each request."""
    player = EnvironmentPlayer(environments, FakeDialogue(), EpisodeLimits(3, 200))
    episodes = MultiTurnEngines(engines, player, in_step=True)  # type: ignore[arg-type]
    return asyncio.run(generate(episodes, requests, SamplingParams(5)))


class Slow(Moods):
    """Answers after a delay that depends on its seed and `sign`."""

    sign = 1

    async def step(self, action: dict[str, Any]) -> Stepped:
        await asyncio.sleep(0.01 * (3 + self.sign * (len(self.texts[0]) % 3)))
        return await super().step(action)


def test_episodes_do_not_depend_on_the_order_of_answers() -> None:
    def episodes(*, backwards: bool) -> list[Generation]:
        Slow.sign = -1 if backwards else 1
        asked = plain_message(Message("user", "A"))
        rows = [{"columns": {"name": "n" * seed}, "messages": [asked]} for seed in range(9)]
        requests = [
            GenerationRequest([65], seed, row=json.dumps(row), environment_seed=seed) for seed, row in enumerate(rows)
        ]
        engines = SeededEngines(backwards=backwards)
        with OpenEnvLike(Slow) as server, opened(server, num_workers=4) as environments:
            return played(engines, environments, requests)

    found = episodes(backwards=False)
    assert found == episodes(backwards=True)
    facts = [generation.episode for generation in found]
    assert all(one is not None and one.turn_rewards == (0.5, 0.5, 0.5) and one.failure is None for one in facts)
    assert len({tuple(one.token_ids) for one in found}) == 9


def test_a_server_that_dies_in_a_batch_fails_its_episodes_and_serves_the_next_batch_when_it_is_back() -> None:
    asked = {"columns": {}, "messages": [plain_message(Message("user", "A"))]}
    requests = [GenerationRequest([65], seed, row=json.dumps(asked), environment_seed=seed) for seed in range(4)]
    with OpenEnvLike(Moods) as server, opened(server) as environments:

        class Killing(SeededEngines):
            """Kills the server before the second turn."""

            num_turns = 0

            def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
                super().begin(requests, sampling)
                self.num_turns += 1
                if self.num_turns == 2:
                    server.kill()

        engines = Killing(backwards=False)
        broken = [generation.episode for generation in played(engines, environments, requests)]
        assert [one and one.failure for one in broken] == ["closed the connection (code 1006)"] * 4
        with OpenEnvLike(Moods, port=server.port):
            sound = [generation.episode for generation in played(engines, environments, requests)]
        assert [one and (one.failure, one.turn_rewards) for one in sound] == [(None, (0.5, 0.5, 0.5))] * 4


def fields(needed: tuple[str, ...] = (), **types: str) -> dict[str, Any]:
    return {"properties": {name: {"type": kind} for name, kind in types.items()}, "required": list(needed)}


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        (TEXT_ACTION, "message"),
        (TOOL_ACTION, None),
        ({"title": "Action"}, None),
        (fields(("answer",), answer="string", note="string"), "answer"),
        (fields(code="string", is_final="boolean"), "code"),
    ],
)
def test_the_schema_decides_how_a_turn_becomes_an_action(schema: dict[str, Any], field: str | None) -> None:
    assert text_field(schema) == field


@pytest.mark.parametrize(
    "schema",
    [
        fields(("action_id",), action_id="integer", game="string"),
        fields(("move", "piece"), move="string", piece="string"),
        fields(("text", "count"), text="string", count="integer"),
        fields(command="string", path="string"),
    ],
)
def test_actions_that_a_turn_cannot_be_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SessionFailed, match=r"^takes actions with the fields .*, .*: supported are actions with one"):
        text_field(schema)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "hi", "metadata": {"a": 1}, "score": None}, "hi"),
        ({"stdout": "4", "exit_code": 0}, '{"stdout": "4", "exit_code": 0}'),
        ({"board": [1, 2]}, '{"board": [1, 2]}'),
        ({"metadata": {}}, ""),
        (None, ""),
        ({"tool_name": "add", "result": {"content": [], "structured_content": {"sum": 3}}}, '{"sum": 3}'),
        ({"tool_name": "add", "result": {"content": [{"type": "text", "text": "no"}], "is_error": True}}, "Error: no"),
        ({"tool_name": "add", "result": 4, "error": None}, "4"),
    ],
)
def test_an_observation_becomes_text(observation: object, text: str) -> None:
    assert observation_text(observation) == text


@pytest.mark.parametrize(
    ("url", "socket"),
    [
        ("ws://host:8000", "ws://host:8000/ws"),
        ("http://host:8000/", "ws://host:8000/ws"),
        ("https://user-space.hf.space/ws", "wss://user-space.hf.space/ws"),
        ("wss://host/games/one?key=2", "wss://host/games/one/ws?key=2"),
    ],
)
def test_urls_of_all_schemes_lead_to_the_socket(url: str, socket: str) -> None:
    assert OpenEnvServer(url, timeout=1.0).socket_url == socket


def refusal(start: Callable[[], OpenEnvLike]) -> str:
    with start() as server, pytest.raises(UsageError) as caught, opened(server):
        pass
    return str(caught.value).removeprefix(f"--environment {server.url} ")


def test_a_server_that_is_not_understood_is_refused_at_the_start() -> None:
    board = fields(column="integer")
    assert refusal(lambda: OpenEnvLike(Moods, action=None)) == (
        "answered with status 404 at /schema: it is not an OpenEnv server"
    )
    assert refusal(lambda: OpenEnvLike(Moods, action=board)).startswith("takes actions with the fields column: ")
    assert refusal(lambda: OpenEnvLike(Moods, action=TOOL_ACTION)).startswith("answered with EXECUTION_ERROR")
    assert refusal(lambda: OpenEnvLike(Tools, action=TOOL_ACTION, max_sessions=0)).startswith("has no free session")


def test_a_server_that_is_not_there_is_refused_at_the_start() -> None:
    with OpenEnvLike(Moods) as server:
        server.kill()
        with pytest.raises(UsageError, match=r"^--environment ws://127.0.0.1:\d+ cannot be reached"), opened(server):
            pass


REAL = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, name="", **row):
        self.name = f"{name}{seed}"
        return Heard(text=f"hello {name}")

    def step(self, action, timeout_s=None, **others):
        if action.message == "raise":
            raise ValueError("a mood")
        return Heard(text=f"{self.name} {action.message}", reward=0.5, done=action.message == "end")

    @property
    def state(self):
        return State()

app = create_app(Echo, Say, Heard, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture
def real_server() -> Iterator[str]:
    """Start a server of the package openenv."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    process = subprocess.Popen([sys.executable, "-c", REAL, str(port)], stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: accepts(port) or process.poll() is not None, limit=60)
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def accepts(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="pip install openenv==0.10.0")
def test_the_package_openenv_serves_episodes(real_server: str) -> None:
    provider = OpenEnvServer(real_server, timeout=30)
    with SessionEnvironments(real_server, provider, timeout=30, num_workers=2) as environments:
        assert environments.description.tools == ()
        assert ask(environments, 0, Reset({"name": "é"}, 4)) == Reply(("hello é",))
        assert ask(environments, 1, Reset({}, 5)) == Reply(("hello ",))
        assert ask(environments, 0, Text("one 🚀")) == Reply(("é4 one 🚀",), reward=0.5)
        failure = ask(environments, 1, Text("raise")).failure
        assert failure is not None
        assert "a mood" in failure
        assert ask(environments, 0, Text("end")) == Reply(("é4 end",), reward=0.5, is_done=True)
