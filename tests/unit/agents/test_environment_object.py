"""Environment objects of one episode: handling of rewards, results, errors and unusual class forms."""

import asyncio
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.agents.environment_class import described, load_class, tool_schemas
from rlhf_cli.agents.environment_object import ENDED, EnvironmentObject
from rlhf_cli.agents.records import Calls, Finish, Reply, Reset, Text
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.sandbox.run import SandboxError

DOCS = Path(__file__).parents[3] / "docs"


def begun(kind: type[Any], row: Mapping[str, Any] | None = None, *, seed: int = 0) -> EnvironmentObject:
    """Create an environment of a class and reset it."""
    environment = EnvironmentObject(described(kind))
    reply = environment.answer(Reset(row or {}, seed))
    assert reply.failure is None, reply
    return environment


def call(environment: EnvironmentObject, name: str, **arguments: Any) -> Reply:
    return environment.answer(Calls((ToolCall(name, arguments),)))


class Counter:
    """Adds numbers; the reward is their sum."""

    def reset(self, start=0):
        self.reward, self.done = start, False

    def add(self, number: float) -> float:
        """Add a number.

        Args:
            number: the number
        """
        self.reward += number
        self.done = self.reward > 10
        return self.reward

    def fail(self, kind: str):
        """Raise an error.

        Args:
            kind: which error
        """
        raise {"value": ValueError("two\n lines"), "exit": SystemExit(3), "sandbox": SandboxError("no namespaces")}[
            kind
        ]


def test_the_rewards_of_replies_add_up_to_the_last_value_of_the_attribute() -> None:
    environment = EnvironmentObject(described(Counter))
    replies = [environment.answer(Reset({"start": 2}, 0))]
    replies += [call(environment, "add", number=number) for number in (3, -1, 0)]
    replies.append(environment.answer(Finish()))
    assert [reply.reward for reply in replies] == [2, 3, -1, 0, 0]
    assert [reply.is_done for reply in replies] == [False, False, False, False, True]


def test_calls_after_the_end_are_not_made() -> None:
    environment = begun(Counter)
    reply = environment.answer(Calls(tuple(ToolCall("add", {"number": 6}) for _ in range(4))))
    assert reply == Reply(("6", "12", ENDED, ENDED), reward=12, is_done=True)
    assert environment.answer(Finish()) == Reply(reward=0.0, is_done=True)


@pytest.mark.parametrize(
    ("name", "arguments", "observation"),
    [
        ("add", {}, "Error: add: missing a required argument: 'number'. Arguments: number"),
        ("add", {"number": 1, "x": 2}, "Error: add: got an unexpected keyword argument 'x'. Arguments: number"),
        ("add", {"self": 1, "number": 2}, "Error: add: got an unexpected keyword argument 'self'. Arguments: number"),
        ("subtract", {}, "Error: there is no tool 'subtract'. Tools: add, fail"),
        ("reset", {}, "Error: there is no tool 'reset'. Tools: add, fail"),
        ("__init__", {}, "Error: there is no tool '__init__'. Tools: add, fail"),
        ("fail", {"kind": "value"}, "Error: two lines"),
        ("fail", {"kind": "exit"}, "Error: 3"),
        ("add", {"number": "one"}, "Error: unsupported operand type(s) for +=: 'int' and 'str'"),
    ],
)
def test_a_wrong_call_is_an_observation(name: str, arguments: dict[str, Any], observation: str) -> None:
    environment = begun(Counter)
    assert call(environment, name, **arguments) == Reply((observation,))
    assert call(environment, "add", number=1).observations == ("1",)


def test_a_sandbox_that_broke_is_no_observation() -> None:
    failure = call(begun(Counter), "fail", kind="sandbox").failure
    assert failure is not None
    assert failure.startswith("raised SandboxError: no namespaces")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, ""),
        ("plain\n", "plain\n"),
        ({"a": [1, None], "b": "ü"}, '{"a": [1, null], "b": "ü"}'),
        (True, "true"),
        ({1}, "{1}"),
        ("\ud800", "?"),
    ],
)
def test_results_become_text(result: object, text: str) -> None:
    class Source:
        def reset(self): ...

        def get(self) -> Any:
            return result

    assert call(begun(Source), "get").observations == (text,)


def test_a_result_without_text_fails_the_environment() -> None:
    """The observation would contain a memory address, which differs between runs."""

    class Source:
        def reset(self): ...

        def get(self) -> Any:
            return {"found": [self]}

    failure = call(begun(Source), "get").failure or ""
    assert failure.startswith("returned dict from get, which has no stable text: {'found': [<")


class Vault:
    """TRL's `environment_factory` form: a hint in the prompt, documented methods, and its own reward."""

    def __init__(self):
        self.turns = 0

    def reset(self, **kwargs) -> str | None:
        self.code = kwargs["code"]
        self.is_open = False
        return f" The code has {len(self.code)} digits."

    def turn(self, digit: int) -> str:
        """
        Turn the wheel.

        Args:
            digit: where to stop.

        Returns:
            Whether it clicked.
        """
        self.turns += 1
        self.is_open = str(digit) == self.code
        return "click" if self.is_open else "nothing"

    def get_reward(self) -> float:
        return float(self.is_open) / self.turns

    def _secret(self) -> str:
        return self.code


def test_a_class_of_trl_runs_and_is_asked_for_its_reward_at_the_end_only() -> None:
    environment = EnvironmentObject(described(Vault))
    row = {"prompt": [{"role": "user", "content": "Open it."}], "code": "7"}
    assert environment.answer(Reset(row, 0)) == Reply((" The code has 1 digits.",))
    assert call(environment, "turn", digit=3) == Reply(("nothing",))
    assert call(environment, "turn", digit=7) == Reply(("click",))
    assert environment.answer(Finish()) == Reply(reward=0.5, is_done=True)


def test_schemas_are_made_from_signatures_and_docstrings() -> None:
    assert tool_schemas(described(Vault)) == [
        {
            "type": "function",
            "function": {
                "name": "turn",
                "description": "Turn the wheel.",
                "parameters": {
                    "type": "object",
                    "properties": {"digit": {"type": "integer", "description": "where to stop."}},
                    "required": ["digit"],
                },
                "return": {"type": "string", "description": "Whether it clicked."},
            },
        }
    ]


def test_a_reward_that_fails_at_the_end_fails_the_environment() -> None:
    environment = begun(Vault, {"code": "7"})
    failure = environment.answer(Finish()).failure
    assert failure is not None
    assert failure.startswith("raised ZeroDivisionError: float division by zero (test_environment_object.py, line")


class Guess:
    """A game without tools that uses Gymnasium's five return values and its arguments of `reset`."""

    def reset(self, *, seed=None, options=None):
        self.seed, self.tries = seed, 0
        return {"tries": 3}, {"info": "of no use"}

    def step(self, action):
        self.tries += 1
        return f"{action}?", float(action == "x"), action == "x", self.tries == 3, {}

    def render(self): ...

    def close(self): ...


def test_a_game_of_gymnasium_runs_to_its_end_or_its_truncation() -> None:
    environment = EnvironmentObject(described(Guess))
    assert environment.answer(Reset({"seed": 5, "prompt": "Guess."}, 1)) == Reply(('{"tries": 3}',))
    assert environment.answer(Text("y")) == Reply(("y?",))
    assert environment.answer(Text("x")) == Reply(("x?",), reward=1.0, is_done=True)
    environment = begun(Guess)
    replies = [environment.answer(Text("y")) for _ in range(3)]
    assert replies == [*[Reply(("y?",))] * 2, Reply(("y?",), is_done=True, is_truncated=True)]
    environment = begun(Guess)
    first, second, won = (environment.answer(Text(text)) for text in "yyx")
    assert first == second == Reply(("y?",))
    assert won == Reply(("x?",), reward=1.0, is_done=True)  # the task ended, although at the limit as well


@pytest.mark.parametrize(
    ("result", "reply"),
    [
        (("seen", 0.5, True), Reply(("seen",), 0.5, True)),
        (["seen", 1, 0], Reply(("seen",), 1.0, False)),
        (("seen", True, 1, {"info": 0}), Reply(("seen",), 1.0, True)),
        ({"observation": "seen", "reward": 2, "done": True}, Reply(("seen",), 2.0, True)),
        ({"observation": "seen", "reward": None}, Reply(("seen",), 0.0, False)),
        ({"observation": "seen", "terminated": True}, Reply(("seen",), 0.0, True)),
        ({"observation": "seen", "truncated": True}, Reply(("seen",), 0.0, True, True)),
        ("seen", Reply(failure="returned str from step, not (observation, reward, done)")),
        (("seen", 1), Reply(failure="returned tuple from step, not (observation, reward, done)")),
        (("", "1.0", 0), Reply(failure="has the reward of step '1.0', which is not a finite number")),
        (("", float("nan"), 0), Reply(failure="has the reward of step 'nan', which is not a finite number")),
    ],
)
def test_every_form_of_a_step(result: object, reply: Reply) -> None:
    class Game:
        def reset(self): ...

        def step(self, text):
            return result

    assert begun(Game).answer(Text("")) == reply


def test_the_reward_of_the_end_is_the_final_value_beside_rewards_of_steps() -> None:
    class Game:
        def reset(self): ...

        def step(self, text):
            return "", 0.25, text == "end"

        def get_reward(self):
            return 2

    environment = begun(Game)
    assert environment.answer(Text("")).reward == 0.25
    assert environment.answer(Text("end")).reward == 1.75


class Waiting:
    """Async methods that need the same event loop, because a lock is bound to the loop that first waits for it."""

    async def reset(self, **row):
        self.lock = asyncio.Lock()
        await self.lock.acquire()
        asyncio.get_running_loop().call_later(0.01, self.lock.release)

    async def wait(self) -> str:
        """Wait."""
        await self.lock.acquire()
        return "released"

    async def get_reward(self):
        await asyncio.sleep(0)
        return 1.0


def test_methods_may_be_async_and_share_a_loop() -> None:
    environment = begun(Waiting)
    assert call(environment, "wait") == Reply(("released",))
    assert environment.answer(Finish()) == Reply(reward=1.0, is_done=True)


TOOL = """
import xmlrpc.client

class Environment:
    api = xmlrpc.client.ServerProxy("http://127.0.0.1:1")  # answers every attribute

    def reset(self, **row):
        self.done = False
        {reset}

    def win(self) -> str:
        \"\"\"Win.\"\"\"
        {win}
        self.done = True
        return "won"

{more}
"""
HELPER = """
def score(environment):
    environment.reward = 1.0
"""
ANOTHER = """
class Other:
    def reset(self):
        self.reward = 1.0
"""


@pytest.mark.parametrize(
    ("parts", "lacks_reward"),
    [
        ({}, True),
        ({"more": '    def reward(self) -> float:\n        """Return 1."""\n        return 1.0'}, True),
        ({"more": ANOTHER}, True),
        ({"win": "self.reward = 1.0"}, False),
        ({"win": "setattr(self, 'reward', 1.0)"}, False),
        ({"win": "vars(self).update(reward=1.0)"}, False),
        ({"win": "score(self)", "more": HELPER}, False),
        ({"more": "    reward: float | None = None"}, False),
        ({"more": "    @property\n    def reward(self):\n        return getattr(self, 'found', None)"}, True),
        ({"more": "    @property\n    def reward(self):\n        return 0.5"}, False),
        ({"reset": "self.reward = 0.0"}, False),
    ],
)
def test_an_episode_without_any_reward_says_so_at_its_end(
    parts: dict[str, str], lacks_reward: bool, tmp_path: Path
) -> None:
    """A class whose tool may set the reward gives 0 if the tool is never called."""
    assert begun_with(tmp_path, **parts).answer(Finish()).lacks_reward == lacks_reward


def begun_with(folder: Path, **parts: str) -> EnvironmentObject:
    file = folder / "environment.py"
    file.write_text(TOOL.format(**{"reset": "", "win": "", "more": ""} | parts))
    environment = EnvironmentObject(load_class(file, None))
    assert environment.answer(Reset({}, 0)).failure is None
    return environment


def test_an_episode_that_a_tool_ends_says_so_too_if_it_has_no_reward(tmp_path: Path) -> None:
    assert call(begun_with(tmp_path), "win") == Reply(("won",), is_done=True, lacks_reward=True)
    assert call(begun_with(tmp_path, win="self.reward = 1"), "win") == Reply(("won",), reward=1.0, is_done=True)


class Sums:
    """Takes some of the columns, one of them with a default."""

    def reset(self, a, b=10):
        self.sum = a + b

    def show(self) -> int:
        """Show the sum."""
        return self.sum


@pytest.mark.parametrize(("row", "shown"), [({"a": 1, "other": 5}, "11"), ({"a": 1, "b": 2}, "3")])
def test_reset_gets_the_columns_that_it_takes(row: dict[str, int], shown: str) -> None:
    assert call(begun(Sums, row), "show").observations == (shown,)


def test_a_missing_column_is_named() -> None:
    sentence = "needs the column 'a' in reset; the row has b, prompt"
    assert EnvironmentObject(described(Sums)).answer(Reset({"b": 1, "prompt": ""}, 0)) == Reply(failure=sentence)


class Dice:
    """Uses the global random generator."""

    def reset(self, seed): ...

    def throw(self) -> int:
        """Throw a die."""
        return random.randrange(10**9)


def test_global_generators_repeat_by_the_seed_of_the_episode() -> None:
    throws = [call(begun(Dice, seed=seed), "throw").observations for seed in (1, 1, 2)]
    assert throws[0] == throws[1] != throws[2]


def test_an_error_of_reset_is_a_failure() -> None:
    class Broken:
        def reset(self, a):
            raise KeyError(a)

        def step(self, text): ...

    failure = EnvironmentObject(described(Broken)).answer(Reset({"a": "x"}, 0)).failure
    assert failure is not None
    assert failure.startswith("raised KeyError: 'x' (test_environment_object.py, line")


def test_a_class_without_a_form_is_refused() -> None:
    class Nothing:
        def reset(self): ...

    class NoReset:
        def tool(self): ...

    with pytest.raises(BadResult, match=r"has class Nothing without tools: add public methods, or step\(text\)"):
        described(Nothing)
    with pytest.raises(BadResult, match="has class NoReset without a method reset"):
        described(NoReset)

    class Sized:
        def __init__(self, size, depth=1): ...

        def reset(self): ...

        def tool(self): ...

    class Deaf:
        def reset(self): ...

        def step(self): ...

    with pytest.raises(BadResult, match=r"has Sized\.__init__, which requires 'size': it is called without"):
        described(Sized)
    with pytest.raises(BadResult, match=r"has Deaf\.step, which must accept the text of a turn: step\(self, text\)"):
        described(Deaf)


def test_public_methods_beside_step_are_named_because_no_model_can_call_them() -> None:
    class Game:
        def reset(self): ...

        @staticmethod
        def step(text): ...

        def look(self): ...

    assert described(Game).about == "step reads the text of each turn, so look cannot be called"
    assert described(Guess).about == "step reads the text of each turn"


# An agent in OpenRLHF's form, without that package installed.
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        feedback = "<|im_end|>\\n<|im_start|>user\\nNo.<|im_end|>\\n<|im_start|>assistant\\n"
        return {"rewards": 0.0, "scores": 0.0, "environment_feedback": feedback, "done": False}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_an_agent_of_openrlhf_is_refused_with_the_form_to_write_instead(tmp_path: Path) -> None:
    path = tmp_path / "agent_func.py"
    path.write_text(AGENT)
    with pytest.raises(BadResult, match=r"is an OpenRLHF agent: rewrite it as class Environment with reset\(self, "):
        load_class(path, None)
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "coming-from.md").read_text(), flags=re.DOTALL)
    path.write_text(example)
    found = EnvironmentObject(load_class(path, None))
    assert found.answer(Reset({"answer": "42"}, 0)) == Reply()
    assert found.answer(Text("41")) == Reply(("No. Try again.",))
    assert found.answer(Text("It is 42")) == Reply(("Right.",), reward=1.0, is_done=True)


@pytest.mark.parametrize("problem", ["no docstring", "no hint", "no line"])
def test_a_tool_without_documentation_is_refused_by_its_name(problem: str) -> None:
    class Bad:
        def reset(self): ...

        def tool(self, x: int): ...

    Bad.tool.__doc__ = {"no docstring": None, "no hint": "Do.\n\nArgs:\n    x: it", "no line": "Do."}[problem]
    if problem == "no hint":
        Bad.tool.__annotations__.clear()
    with pytest.raises(BadResult, match=r"has Bad\.tool, which cannot be a tool: .* A tool requires a docstring"):
        tool_schemas(described(Bad))


def test_json_of_numbers_of_numpy_is_no_reason_to_fail() -> None:
    numpy = pytest.importorskip("numpy")

    class Source:
        def reset(self):
            self.reward = numpy.float32(0.5)

        def get(self):
            """Get."""
            return [numpy.int64(3)]

    environment = EnvironmentObject(described(Source))
    assert environment.answer(Reset({}, 0)).reward == 0.5
    assert "3" in json.dumps(call(environment, "get").observations)
