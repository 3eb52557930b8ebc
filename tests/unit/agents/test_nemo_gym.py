"""Sessions with resources servers of NeMo Gym: example servers of the real package, and a stand-in for one of them."""

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from scoring import wait_until

from rlhf_cli.agents.nemo_gym import NemoGymServer
from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset, Text
from rlhf_cli.agents.session_environments import SessionEnvironments
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.config.episodes import EpisodeConfig, environment_kind
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.errors import UsageError
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.options import build_config

NEEDED = {"pretrain": "model", "prompt_data": "rows.jsonl", "output": "run"}
COUNT = {
    "type": "function",
    "name": "increment_counter",
    "description": "",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "strict": True,
}
READ = {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}}
# As in the package's data/example.jsonl: 3 + 1 + 2 = 6.
COUNTER_ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "add 1 then add 2 then get the count"}],
        "tools": [COUNT, READ],
    },
    "expected_count": 6,
    "initial_count": 3,
}
START = """
import sys
from unittest.mock import MagicMock
import importlib, uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.server_utils import ServerClient
module, name, port = sys.argv[1:]
app = importlib.import_module(f"resources_servers.{module}.app")
kind = getattr(app, name + "Config", BaseResourcesServerConfig)
config = kind(host="127.0.0.1", port=int(port), entrypoint="", name=module)
server = getattr(app, name)(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=int(port), log_level="warning")
"""
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("nemo_gym") is None,
    reason="nemo-gym requires Python 3.12: unpack its wheel into a folder on PYTHONPATH, with its dependencies",
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def accepts(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Iterator[str]:
    """Start an example server of the package."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", START, *request.param, str(port)], stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: accepts(port) or process.poll() is not None, limit=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class CounterLike:
    """Follows `resources_servers/example_session_state_mgmt` of nemo-gym 0.4.0, with sessions in a cookie."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.app = web.Application()
        self.app.add_routes(
            [
                web.get("/openapi.json", self.paths),
                web.post("/seed_session", self.seed),
                web.post("/increment_counter", self.increment),
                web.post("/get_counter_value", self.read),
                web.post("/verify", self.verify),
            ]
        )

    async def paths(self, request: web.Request) -> web.Response:
        names = ("seed_session", "verify", "increment_counter", "get_counter_value")
        return web.json_response({"paths": {f"/{name}": {"post": {}} for name in names}})

    async def seed(self, request: web.Request) -> web.Response:
        session = uuid4().hex
        self.counts[session] = (await request.json())["initial_count"]
        response = web.json_response({})
        response.set_cookie("session", session)
        return response

    async def increment(self, request: web.Request) -> web.Response:
        count = (await request.json()).get("count")
        if not isinstance(count, int):
            return web.json_response({"detail": [{"loc": ["body", "count"], "msg": "Field required"}]}, status=422)
        self.counts[request.cookies["session"]] += count
        return web.json_response({"success": True})

    async def read(self, request: web.Request) -> web.Response:
        return web.json_response({"count": self.counts[request.cookies["session"]]})

    async def verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.verified.append(body)
        if "reward" in body:
            return web.json_response({"reward": body["reward"]})
        is_right = body["expected_count"] == self.counts[request.cookies["session"]]
        return web.json_response({**body, "reward": float(is_right)})


FOLLOW_UPS_ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is 15 multiplied by 8?"}]},
    "follow_ups": ["Now divide that result by 6."],
    "expected_answer": "20",
}
JUMP = {"type": "function", "name": "jump", "description": "", "parameters": {"type": "object", "properties": {}}}


class SteppedLike:
    """Follows the class GymnasiumServer of nemo-gym 0.4.0 and its `example_multi_turn_gymnasium`, with a tool."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.app = web.Application()
        self.app.add_routes(
            [
                web.get("/openapi.json", self.paths),
                web.post("/reset", self.reset),
                web.post("/step", self.step),
            ]
        )

    async def paths(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {"/reset": {}, "/step": {}, "/aggregate_metrics": {}}})

    async def reset(self, request: web.Request) -> web.Response:
        response = web.json_response({"observation": (await request.json()).get("opening"), "info": {}})
        response.set_cookie("session", "0")
        return response

    async def step(self, request: web.Request) -> web.Response:
        turn, body = int(request.cookies["session"]), await request.json()
        self.steps.append(body)
        output = body["response"]["output"]
        if body.get("is_broken"):
            return web.json_response({"detail": "no step"})
        answer: dict[str, Any] = {
            "observation": None,
            "reward": 0.0,
            "terminated": False,
            "truncated": False,
            "info": {},
        }
        calls = [one for one in output if one["type"] == "function_call"]
        if calls:
            found = [{"call_id": one["call_id"], "output": f"{one['name']} {place}"} for place, one in enumerate(calls)]
            answer |= {"info": {"tool_outputs": found[::-1]}, "observation": "look", "reward": 0.25}
        elif turn < len(body["follow_ups"]):
            answer["observation"] = body["follow_ups"][turn]
        else:
            text = "".join(part["text"] for one in output for part in one["content"])
            answer |= {"reward": float(body["expected_answer"] in text), "terminated": text != "late"}
            answer["truncated"] = text == "late"
        response = web.json_response(answer)
        response.set_cookie("session", str(turn + 1))
        return response


def check_follow_ups(url: str) -> None:
    """Play two episodes of the questions at the same time."""
    with opened(url, FOLLOW_UPS_ROW) as environments:
        assert environments.description.about == "NeMo Gym server with text turns"
        for episode, last in enumerate(("It is 20.", "It is 2.")):
            assert ask(environments, episode, Reset(FOLLOW_UPS_ROW, 0)) == Reply()
            assert ask(environments, episode, Text("120")) == Reply(("Now divide that result by 6.",))
            assert ask(environments, episode, Text(last)) == Reply(("",), reward=1.0 - episode, is_done=True)


@pytest.fixture(params=[CounterLike])
def like(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """Start a stand-in, in an event loop of its own."""
    server, port = request.param(), free_port()
    thread, runner = LoopThread("server"), web.AppRunner(server.app)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    thread.run(start())
    yield server, f"http://127.0.0.1:{port}"
    thread.end(runner.cleanup)


def opened(url: str, row: dict[str, Any]) -> SessionEnvironments:
    return SessionEnvironments(f"nemo_gym:{url}", NemoGymServer(url, row), timeout=30, num_workers=4)


def ask(environments: SessionEnvironments, episode: int, action: Action) -> Reply:
    return asyncio.run(asyncio.wait_for(environments.answer(episode, action), 30))


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name, arguments)


def check_counter(url: str, row: dict[str, Any]) -> None:
    """Play three episodes of the counter at the same time."""
    with opened(url, row) as environments:
        description = environments.description
        assert description.about == "NeMo Gym server with tools increment_counter, get_counter_value"
        assert [tool["function"]["name"] for tool in description.tools] == ["increment_counter", "get_counter_value"]
        for episode, initial in enumerate((3, 4, 3)):
            assert ask(environments, episode, Reset(row | {"initial_count": initial}, 0)) == Reply()
        # All episodes add 3: to 3, which is right, and to 4, which is not. The last one adds nothing.
        for episode in (0, 1):
            both = Calls((call("increment_counter", count=1), call("increment_counter", count=2)), "I add.")
            assert [*map(json.loads, ask(environments, episode, both).observations)] == [{"success": True}] * 2
        (count,) = ask(environments, 0, Calls((call("get_counter_value"),))).observations
        assert json.loads(count) == {"count": 6}
        rewards = [ask(environments, episode, Finish("The count is 6.")) for episode in range(3)]
        assert rewards == [Reply(("",), reward=reward, is_done=True) for reward in (1.0, 0.0, 0.0)]


def test_episodes_have_separate_counters_and_a_reward_at_the_end(like: tuple[CounterLike, str]) -> None:
    server, url = like
    check_counter(url, COUNTER_ROW)
    output = server.verified[0]["response"]["output"]
    assert [(one["type"], one.get("call_id")) for one in output] == [
        ("message", None),
        ("function_call", "call_1"),
        ("function_call", "call_2"),
        ("function_call_output", "call_1"),
        ("function_call_output", "call_2"),
        ("function_call", "call_5"),
        ("function_call_output", "call_5"),
        ("message", None),
    ]
    assert output[2] == {
        "type": "function_call",
        "name": "increment_counter",
        "arguments": '{"count": 2}',
        "call_id": "call_2",
    }
    assert output[-1]["content"][0]["text"] == "The count is 6."


@needs_package
@pytest.mark.parametrize(
    "real", [("example_session_state_mgmt", "StatefulCounterResourcesServer")], indirect=True, ids=["counter"]
)
def test_the_example_server_with_sessions_gives_the_same_replies(real: str) -> None:
    spec = importlib.util.find_spec("resources_servers.example_session_state_mgmt")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    lines = (Path(spec.submodule_search_locations[0]) / "data" / "example.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert (row["initial_count"], row["expected_count"]) == (3, 6)
    check_counter(real, row)


@needs_package
@pytest.mark.parametrize("real", [("mcqa", "MCQAResourcesServer")], indirect=True, ids=["mcqa"])
@pytest.mark.parametrize(("text", "reward"), [("I think \\boxed{B}", 1.0), ("\\boxed{A}", 0.0), ("B", 0.0)])
def test_a_server_without_tools_rewards_the_first_turn(real: str, text: str, reward: float) -> None:
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "Which one?"}]},
        "options": [{"A": "one"}, {"B": "two"}],
        "expected_answer": "B",
        "grading_mode": "strict_single_letter_boxed",
    }
    with opened(real, row) as environments:
        assert environments.description.about == "NeMo Gym server with a reward for the first turn"
        assert ask(environments, 0, Reset(row, 0)) == Reply()
        assert ask(environments, 0, Text(text)) == Reply(("",), reward=reward, is_done=True)


stepped = pytest.mark.parametrize("like", [SteppedLike], indirect=True)


@needs_package
@pytest.mark.parametrize(
    "real", [("example_multi_turn_gymnasium", "ExampleMultiTurnEnv")], indirect=True, ids=["questions"]
)
def test_the_example_server_with_steps_gives_the_same_replies(real: str) -> None:
    check_follow_ups(real)


@stepped
def test_each_step_sends_one_turn_and_returns_the_next_message(like: tuple[SteppedLike, str]) -> None:
    server, url = like
    check_follow_ups(url)
    assert [step["response"]["output"][0]["content"][0]["text"] for step in server.steps[:2]] == ["120", "It is 20."]


@stepped
def test_steps_with_tools_openings_limits_and_faults(like: tuple[SteppedLike, str]) -> None:
    row = FOLLOW_UPS_ROW | {"responses_create_params": {"input": "Jump.", "tools": [JUMP]}, "follow_ups": []}
    with opened(like[1], row) as environments:
        assert environments.description.about == "NeMo Gym server with tools jump"
        assert ask(environments, 0, Reset(row | {"opening": "Your turn."}, 0)) == Reply(("\n\nYour turn.",))
        both = Calls((call("jump"), call("jump")), "I jump.")
        assert ask(environments, 0, both) == Reply(("jump 0", "jump 1\nlook"), reward=0.25)
        assert ask(environments, 0, Finish("")) == Reply(is_done=True)
        ask(environments, 1, Reset(row, 0))
        assert ask(environments, 1, Finish("late")) == Reply(("",), is_done=True, is_truncated=True)
        ask(environments, 2, Reset(row | {"is_broken": True}, 0))
        assert ask(environments, 2, Finish("20")).failure == 'returned no reward from /step: {"detail": "no step"}'


def test_the_model_reads_errors_of_tools_and_calls_no_other_path(like: tuple[CounterLike, str]) -> None:
    server, url = like
    with opened(url, COUNTER_ROW) as environments:
        ask(environments, 0, Reset(COUNTER_ROW, 0))
        wrong = Calls((call("increment_counter", amount=1), call("verify", reward=5)))
        first, second = ask(environments, 0, wrong).observations
        assert "Field required" in first
        assert second == "Error: there is no tool 'verify'. Tools: increment_counter, get_counter_value"
        assert server.verified == []


def test_failures_of_a_server_fail_the_episode(like: tuple[CounterLike, str]) -> None:
    _, url = like
    other = {"responses_create_params": {"input": "", "tools": [COUNT]}, "initial_count": 1}
    with opened(url, COUNTER_ROW) as environments:
        found = ask(environments, 0, Reset(other, 0)).failure
        assert found == "has one set of tools for all rows: this row has others than the first one"
        missing = {name: COUNTER_ROW[name] for name in ("responses_create_params", "expected_count")}
        assert str(ask(environments, 1, Reset(missing, 0)).failure).startswith("answered with status 500 at /seed_ses")
        ask(environments, 2, Reset(COUNTER_ROW | {"reward": "much"}, 0))
        found = ask(environments, 2, Finish("")).failure
        assert found == "has the reward of /verify 'much', which is not a finite number"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a"},
            "needs rows of NeMo Gym, with the column 'responses_create_params'; the first row has prompt",
        ),
        ({"responses_create_params": {"tools": [{"type": "web_search"}]}}, "runs tools of the type function only"),
        ({"responses_create_params": {"tools": [COUNT | {"name": "jump"}]}}, "does not have the tool 'jump'"),
    ],
)
def test_rows_that_do_not_fit_are_refused_at_the_start(
    like: tuple[CounterLike, str], row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"--environment nemo_gym:http.* {message}"), opened(like[1], row):
        pass


def test_a_server_that_is_not_there_or_another_one_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be reached"), opened(f"http://127.0.0.1:{free_port()}", COUNTER_ROW):
        pass
    with pytest.raises(UsageError, match="a NeMo Gym server has a URL like http://host:8000"):
        build_config(GRPOConfig, {**NEEDED, "environment": "nemo_gym:ws://host"})


def test_the_name_decides_on_the_kind_the_identity_and_the_prompts() -> None:
    assert environment_kind("nemo_gym:http://host:8000/") == "nemo_gym"
    found = EpisodeConfig(environment="nemo_gym:http://host:8000/counter/").identity(max_len=100)
    assert found == {"environment": "nemo_gym:/counter", "max_turns": 8, "max_len": 100}
    config = build_config(GRPOConfig, {**NEEDED, "environment": "nemo_gym:http://host:8000"})
    assert config.prompts.input_key == "responses_create_params.input"
    assert [one.name for one in config.reward.rewards] == ["environment"]
