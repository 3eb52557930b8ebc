"""Environments of verifiers: worker processes, rows and messages.

With RLHF_VERIFIERS_PYTHON, the interpreter with verifiers 0.4.0 plays the environments in tests/data/verifiers. Without
it, a stand-in checks the protocol between driver and worker.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from scoring import is_alive, wait_until

from rlhf_cli.agents.agent_process import ProgramEnd
from rlhf_cli.agents.chat_records import ChatRequest, Choice, Completion, Refused
from rlhf_cli.agents.verifiers import VerifiersPrograms
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.data.reading.sources import first_rows
from rlhf_cli.data.reading.verifiers import INTERPRETER, check_environment, read_tasks
from rlhf_cli.errors import UsageError

TESTS = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("no_process_is_left")

real = pytest.mark.skipif(INTERPRETER not in os.environ, reason=f"{INTERPRETER} is not set")


@pytest.fixture(autouse=True)
def no_results_of_other_tests() -> None:
    check_environment.cache_clear()
    read_tasks.cache_clear()


@pytest.fixture
def environments(monkeypatch) -> None:
    """Let the interpreter with verifiers find the environments."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "data" / "verifiers"))


@pytest.fixture
def stand_in(monkeypatch) -> None:
    """Use the stand-in for verifiers, with this interpreter."""
    folder = TESTS / "helpers" / "verifiers_like"
    monkeypatch.setenv(INTERPRETER, f"env PYTHONPATH={folder} {sys.executable}")


def said(text: str, *calls: ToolCall) -> Completion:
    return Completion((Choice(text, calls, "tool_calls" if calls else "stop", 1, ()),), 3)


def play(
    name: str, answer: Callable[[ChatRequest], Completion], rows: list[Mapping[str, object]], *, timeout: float = 60
) -> list[ProgramEnd]:
    """Play an episode of each row, one after another in one worker."""

    async def answered(request: ChatRequest) -> Completion:
        return answer(request)

    async def ends() -> list[ProgramEnd]:
        return [await programs.play(row, answered, lambda: None) for row in rows]

    with VerifiersPrograms(name, timeout=timeout, num_workers=1) as programs:
        return asyncio.run(ends())


def rows_of(name: str) -> list[Mapping[str, object]]:
    table = read_tasks(name)
    return [table.read(index) for index in range(table.num_rows)]


def tasks(*kinds: str) -> list[Mapping[str, object]]:
    return [{"task": {"prompt": kind}} for kind in kinds]


def hello(_: ChatRequest) -> Completion:
    return said("hello")


@pytest.mark.usefixtures("stand_in")
def test_tasks_are_rows_whose_rewards_come_from_the_environment():
    name = "verifiers:echo?taskset.factor=0.5&select.limit=1"
    (row,) = rows_of(name)
    prompt = [{"role": "user", "content": "fine"}]
    assert row == {"prompt": prompt, "task": {"prompt": "fine"}, "data_source": "echo"}
    (source,) = first_rows(name, split="train")
    assert (source.where(0), len(source)) == (f"{name} task 0", 1)
    seen = []

    def answer(request: ChatRequest) -> Completion:
        seen.append(request.messages[-1].content)
        return said("hello")

    assert (play(name, answer, [row]), seen) == ([ProgramEnd(2.5)], ["fine"])


@pytest.mark.usefixtures("stand_in")
def test_a_worker_plays_further_episodes_after_failed_ones():
    kinds = ("tells", "fails", "unscored", "infinite", "two", "tells")
    first, failed, unscored, infinite, two, last = play("verifiers:echo", hello, tasks(*kinds))
    assert first.reward == last.reward != os.getpid()
    assert failed.failure == "failed: TaskError: no such file"
    assert unscored == ProgramEnd()
    assert infinite.failure == "printed an invalid reward: Infinity"
    assert two.failure == "failed: an episode had 2 agents, and only one can be trained"
    (other,) = play("verifiers:echo", hello, [{"question": "?"}])
    assert other.failure == "failed: the row has no task of this environment: KeyError: 'task'"


@pytest.mark.usefixtures("stand_in")
def test_a_worker_that_hangs_or_dies_is_replaced():
    seen = []

    def answer(request: ChatRequest) -> Completion:
        seen.append(request.messages[-1].content)
        return said("hello")

    hung, dead, fine = play("verifiers:echo", answer, tasks("hangs", "dies", "fine"), timeout=3)
    assert hung.failure == "sent no request and did not exit within 3 s"
    wait_until(lambda: not is_alive(int(seen[1])))
    assert dead.failure == "exited with code 3; last stderr line: the last words"
    assert fine == ProgramEnd(5.0)


@pytest.mark.usefixtures("stand_in")
def test_a_dropped_episode_leaves_no_process():
    async def never(request: ChatRequest) -> Completion:
        asked.set()
        return await asyncio.Future()

    async def drop() -> None:
        episode = asyncio.create_task(programs.play({"task": {"prompt": "fine"}}, never, lambda: None))
        await asyncio.wait_for(asked.wait(), 60)
        episode.cancel()
        await asyncio.wait({episode})

    asked = asyncio.Event()
    with VerifiersPrograms("verifiers:echo", timeout=60, num_workers=1) as programs:
        asyncio.run(drop())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("absent", "verifiers:absent is not installed: this interpreter has no module absent: .* -m pip install"),
        ("broken", "verifiers:broken cannot be loaded: RuntimeError: two lines"),
        ("", "verifiers: names no environment: write verifiers:NAME"),
        ("echo?id=pair", r"has 2 agents \(solver, judge\), and only one can be trained"),
        ("echo?taskset=1&taskset.factor=2", "has the setting 'taskset' twice, as a value and as a group"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_in_one_sentence(name, fault):
    with pytest.raises(UsageError, match=fault):
        VerifiersPrograms(f"verifiers:{name}", timeout=60, num_workers=1)


@pytest.mark.parametrize(
    ("interpreter", "fault"),
    [
        (None, "verifiers is not installed in a Python environment of its own: python -m venv"),
        ("/no/python", "RLHF_VERIFIERS_PYTHON '/no/python' is not the path of an interpreter"),
        (sys.executable, "requires the package verifiers, 0.4.0 or later .* -m pip install verifiers==0.4.0"),
        ("false", "could not be loaded by false .*exit code 1"),
    ],
)
def test_an_interpreter_without_verifiers_is_refused_with_the_command_to_run(interpreter, fault, monkeypatch):
    monkeypatch.delenv(INTERPRETER, raising=False)
    if interpreter is not None:
        monkeypatch.setenv(INTERPRETER, interpreter)
    with pytest.raises(UsageError, match=fault):
        read_tasks("verifiers:echo")


@real
@pytest.mark.usefixtures("environments")
def test_one_turn_with_two_weighted_rewards():
    rows = rows_of("verifiers:vf_sums")
    assert [row["prompt"] for row in rows[:2]] == [[{"role": "user", "content": f"{n}+{n}="}] for n in (0, 1)]
    answers = {"0+0=": "0", "1+1=": "it is 2", "2+2=": "5", "3+3=": "wrong"}

    def answer(request: ChatRequest) -> Completion:
        return said(answers[request.messages[-1].content])

    ends = play("verifiers:vf_sums", answer, rows)
    assert [end.reward for end in ends] == [1.25, 1.0, 0.25, 0.0]


@real
@pytest.mark.usefixtures("environments")
def test_turns_of_a_user():
    name = "verifiers:vf_higher?select.limit=3"
    rows = rows_of(name)
    guesses = iter(["9", "2", "3"])
    seen = []

    def answer(request: ChatRequest) -> Completion:
        seen.append([message.content for message in request.messages])
        return said(next(guesses))

    assert play(name, answer, rows[2:]) == [ProgramEnd(1.0)]
    assert seen[-1] == ["Guess a number from 1 to 9.", "9", "lower", "2", "higher"]


@real
@pytest.mark.usefixtures("environments")
def test_tools_and_the_limit_of_turns():
    rows = rows_of("verifiers:vf_lookup")

    def answer(request: ChatRequest) -> Completion:
        (tool,) = request.tools
        assert tool["function"]["name"] == "house_find"
        *_, last = request.messages
        if last.role != "tool":
            return said("", ToolCall("house_find", {"thing": "key"}, "call_0"))
        return said(last.content)

    def refuse(request: ChatRequest) -> Completion:
        if request.messages[-1].role == "tool":
            raise Refused("too many turns", code="max_turns_exceeded")
        return answer(request)

    assert play("verifiers:vf_lookup", answer, rows) == [ProgramEnd(1.0)]
    assert play("verifiers:vf_lookup", refuse, rows) == [ProgramEnd(0.0)]
