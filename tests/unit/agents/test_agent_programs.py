"""Agent programs in real processes: their input, exit, and leftover processes."""

import asyncio
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from agent_fakes import TextEngines, dialogues_of
from model_templates import FAMILIES
from scoring import is_alive, wait_until

from rlhf_cli.agents.agent_process import ProgramEnd
from rlhf_cli.agents.agent_programs import AgentPrograms
from rlhf_cli.agents.chat_records import ChatRequest, Choice, Completion, Refused
from rlhf_cli.data.formats.conversations import Message
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.errors import LONGEST_REASON, UsageError
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.trainers.online.multi_turn import EpisodeLimits, MultiTurnEngines
from rlhf_cli.trainers.online.program_player import ProgramPlayer
from rlhf_cli.trainers.online.rollout import generate

pytestmark = pytest.mark.usefixtures("no_process_is_left")

ANSWER = Completion((Choice("hello", (), "stop", 1, (("hello", -1.0),)),), 3)
ASK = """
import json, os, sys, time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

row = json.load(sys.stdin)

def ask(text, **more):
    body = json.dumps({"model": "x", "messages": [{"role": "user", "content": text}], **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
"""


def program(folder: Path, text: str) -> str:
    """Return the command of a program that can send requests."""
    (folder / "program.py").write_text(ASK + text)
    return f"{sys.executable} {folder / 'program.py'}"


Request = tuple[ChatRequest, "asyncio.Future[Completion]"]


class Player:
    """Plays episodes of programs in an event loop of its own."""

    def __init__(self, programs: AgentPrograms) -> None:
        self.programs, self.thread = programs, LoopThread("player of the test")
        self.requests: queue.SimpleQueue[tuple[int, Request]] = queue.SimpleQueue()
        self.num_started = 0

    def start(self, episode: int, row: Mapping[str, object] | None = None) -> "Future[ProgramEnd]":
        """Begin an episode. Its requests come into the queue."""

        async def answer(request: ChatRequest) -> Completion:
            future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self.requests.put((episode, (request, future)))
            return await future

        def started() -> None:
            self.num_started += 1

        return asyncio.run_coroutine_threadsafe(self.programs.play(row or {}, answer, started), self.thread.loop)

    def next(self) -> tuple[int, Request]:
        """Return the next request with its episode."""
        return self.requests.get(timeout=30)

    def answer(self, request: Request, answer: Completion | Refused = ANSWER) -> None:
        """Answer a request."""
        if isinstance(answer, Refused):
            self.thread.call_soon(request[1].set_exception, answer)
        else:
            self.thread.call_soon(request[1].set_result, answer)


@contextmanager
def played(command: str, *, timeout: float = 30, num_workers: int = 1) -> Iterator[Player]:
    """Start a player of programs."""
    with AgentPrograms(command, timeout=timeout, num_workers=num_workers) as programs:
        player = Player(programs)
        yield player
        player.thread.end(partial(asyncio.sleep, 0))


async def answered(request: ChatRequest) -> Completion:
    """Answer a request at once."""
    return ANSWER


def end_of(command: str, row: Mapping[str, object] | None = None) -> ProgramEnd:
    """Run a program, answer all its requests, and return how it ended."""
    with AgentPrograms(command, timeout=30, num_workers=1) as programs:
        return asyncio.run(programs.play(row or {}, answered, lambda: None))


def test_a_program_gets_its_row_asks_and_ends_with_a_reward(tmp_path):
    command = program(tmp_path, "print('a log'); print(json.dumps({'reward': len(ask(row['question']))}))")
    with played(command) as player:
        end = player.start(5, {"question": "why? é"})
        episode, asked = player.next()
        assert (episode, asked[0].messages) == (5, (Message("user", "why? é"),))
        player.answer(asked)
        assert (end.result(30), player.num_started) == (ProgramEnd(5.0), 1)


def test_a_program_gets_few_variables_of_the_run_and_no_key_of_another(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "of the user")
    command = program(
        tmp_path, "print(json.dumps({'reward': 0.0}), file=open(row['file'], 'w'), end=str(dict(os.environ)))"
    )
    assert end_of(command, {"file": str(tmp_path / "seen")}) == ProgramEnd()
    seen = (tmp_path / "seen").read_text()
    assert "secret" not in seen
    assert "of the user" not in seen
    assert "'OPENAI_MODEL': 'policy'" in seen
    assert "'OPENAI_BASE_URL': 'http://127.0.0.1:" in seen


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("print('done')", ProgramEnd()),
        ("print(json.dumps({'reward': True}))", ProgramEnd(1.0)),
        ("print(json.dumps({'reward': 0.5})); print('  ')", ProgramEnd(0.5)),
        ("print(json.dumps({'reward': 'good'}))", ProgramEnd(failure='printed an invalid reward: "good"')),
        ("print(json.dumps({'reward': float('nan')}))", ProgramEnd(failure="printed an invalid reward: NaN")),
        (
            "print(json.dumps({'reward': 10**400}))",
            ProgramEnd(failure=f"printed an invalid reward: {10**400}"[: 27 + LONGEST_REASON]),
        ),
        (
            "print(json.dumps({'note': '\\u2028', 'reward': 0.5}, ensure_ascii=False).encode().decode())",
            ProgramEnd(0.5),
        ),
        ("print(json.dumps([0.5]))", ProgramEnd()),
        ("print('x' * 200_000); print(json.dumps({'reward': 0.5}))", ProgramEnd(0.5)),
    ],
)
def test_the_last_line_of_output_has_the_reward(tmp_path, text, end):
    assert end_of(program(tmp_path, text)) == end


def test_a_program_that_fails_is_described_by_its_last_line(tmp_path):
    end = end_of(program(tmp_path, "print(json.dumps({'reward': 1.0}), flush=True); raise ValueError('a mood')"))
    assert end.failure == "exited with code 1; last stderr line: ValueError: a mood"
    assert end.trace.startswith("Traceback")
    killed = end_of(program(tmp_path, "os.kill(os.getpid(), 9)"))
    assert killed.failure == "was killed by SIGKILL (out of memory?)"


def test_a_program_has_its_time_between_answers_and_is_killed_with_its_children_after_it(tmp_path):
    """The answer takes longer than the limit of the program, whose clock does not run meanwhile."""
    text = (
        "import subprocess; ask('x')\n"
        "child = subprocess.Popen(['sleep', '600']); print(child.pid, file=open(row['file'], 'w'), flush=True)\n"
        "time.sleep(600)"
    )
    with played(program(tmp_path, text), timeout=2.5) as player:
        end = player.start(0, {"file": str(tmp_path / "pid")})
        _, asked = player.next()
        with pytest.raises(TimeoutError):
            end.result(2.7)
        player.answer(asked)
        assert end.result(30).failure == "sent no request and did not exit within 2.5 s"
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_settings_of_sampling_are_reported_once_and_programs_can_be_started_again(tmp_path, caplog):
    command = program(tmp_path, "ask('x', temperature=2); ask('y', temperature=2); print(json.dumps({'reward': 1.0}))")
    programs = AgentPrograms(command, timeout=30, num_workers=1)
    for _ in range(2):
        with programs:
            assert asyncio.run(programs.play({}, answered, lambda: None)) == ProgramEnd(1.0)
    assert [record.message for record in caplog.records if "temperature" in record.message] == [
        "the agent program sets temperature, which is ignored: turns use the run's settings"
    ]


def test_an_episode_that_is_given_up_leaves_no_process_and_its_request_no_answer(tmp_path):
    text = "print(os.getpid(), file=open(row['file'], 'w'), flush=True); ask('x')"
    with played(program(tmp_path, text)) as player:
        end = player.start(0, {"file": str(tmp_path / "pid")})
        _, (_, answer) = player.next()
        end.cancel()
        wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
        wait_until(answer.cancelled)
        player.start(1, {"file": str(tmp_path / "pid")})
        assert player.next()[0] == 1  # no further requests from the first program


def test_a_child_that_asks_after_the_end_of_its_program_is_refused(tmp_path):
    text = (
        "if os.fork():\n"
        "    while not os.path.exists(row['file'] + '.ready'):\n        time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "os.setsid()\n"  # leave the process group that is killed
        "open(row['file'] + '.ready', 'w').close()\n"
        "while not os.path.exists(row['file'] + '.go'):\n    time.sleep(0.01)\n"
        "try:\n    ask('x')\n"
        "except HTTPError as error:\n    print(error.code, file=open(row['file'], 'w'), flush=True)\n"
    )
    seen = tmp_path / "seen"
    with played(program(tmp_path, text)) as player:
        assert player.start(0, {"file": str(seen)}).result(30) == ProgramEnd()
        (tmp_path / "seen.go").touch()
        wait_until(lambda: seen.exists() and seen.read_text() == "401\n")
        assert player.requests.empty()


def test_no_more_processes_run_than_are_allowed(tmp_path):
    command = program(tmp_path, "ask('x'); print(json.dumps({'reward': 1.0}))")
    with played(command, num_workers=2) as player:
        ends = [player.start(episode) for episode in range(3)]
        waiting = [player.next(), player.next()]
        assert {episode for episode, _ in waiting} == {0, 1}
        assert player.num_started == 2
        (first, request), _ = waiting
        player.answer(request, Refused("no"))  # the program fails, which frees a slot
        assert ends[first].result(30).failure is not None
        assert player.next()[0] == 2


def test_a_request_that_waits_while_its_program_exits_is_given_up(tmp_path):
    text = (
        "import threading; threading.Thread(target=ask, args=['x'], daemon=True).start()\n"
        "while not os.path.exists(row['file']):\n    time.sleep(0.01)\n"
        "print(json.dumps({'reward': 1.0}))"
    )
    with played(program(tmp_path, text)) as player:
        end = player.start(0, {"file": str(tmp_path / "go")})
        _, (_, answer) = player.next()
        (tmp_path / "go").touch()
        assert end.result(30) == ProgramEnd(1.0)
        wait_until(answer.cancelled)


def test_programs_that_run_at_the_end_are_killed(tmp_path):
    text = "print(os.getpid(), file=open(row['file'], 'w'), flush=True); ask('x')"
    with played(program(tmp_path, text)) as player:
        end = player.start(0, {"file": str(tmp_path / "pid")})
        player.next()
        player.programs.close()
        assert not is_alive(int((tmp_path / "pid").read_text()))
        with pytest.raises(CancelledError):
            end.result(30)


DRIVER = """
import asyncio, sys
from rlhf_cli.agents.agent_programs import AgentPrograms
programs = AgentPrograms(sys.argv[1], timeout=600, num_workers=1).__enter__()
asyncio.run(programs.play({"file": sys.argv[2]}, None, lambda: None))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of the lifeline is Linux's own")
def test_a_driver_that_is_killed_leaves_no_program_behind(tmp_path):
    text = (
        "import subprocess; child = subprocess.Popen(['sleep', '600'])\n"
        "print(os.getpid(), child.pid, file=open(row['file'], 'w'), flush=True); time.sleep(600)"
    )
    pids = tmp_path / "pids"
    words = [sys.executable, "-c", DRIVER, program(tmp_path, text), str(pids)]
    with subprocess.Popen(words) as driver:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        os.kill(driver.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


def test_a_command_without_a_program_is_refused():
    with pytest.raises(UsageError, match="--agent_command no_such_program --x: program 'no_such_program' not found"):
        AgentPrograms("no_such_program --x", timeout=1, num_workers=1)


@pytest.mark.parametrize(
    "command",
    ["python no.py", "python3 -u -W ignore -Xdev no.py --x a.py", "env A=1 B= python no.py", "python -sEW ignore no"],
)
def test_a_command_without_its_python_file_is_refused(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"^--agent_command .*: file 'no(\.py)?' not found$"):
        AgentPrograms(command, timeout=1, num_workers=1)
    for name in ("no", "no.py"):
        (tmp_path / name).touch()
    AgentPrograms(command, timeout=1, num_workers=1)


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "-c", "cd there && python no.py"],
        ["bash", "no.py"],
        ["env", "-C", "there", "python", "no.py"],
        ["env", "A=1"],
        ["env", "A=1", "bash", "-c", "python no.py"],
        ["timeout", "9", "python", "no.py"],
        ["python", "-c", "import no", "no.py"],
        ["python", "-um", "no", "no.py"],
        ["python", "-", "no.py"],
        ["python", "--version"],
        ["python"],
    ],
    ids=shlex.join,
)
def test_a_command_whose_file_nobody_knows_before_it_runs_is_taken(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    AgentPrograms(shlex.join(words), timeout=1, num_workers=1)


AGENT = Path(__file__).parents[3] / "examples" / "agents" / "calculator.py"


def test_the_example_of_openais_client_is_trained_unchanged():
    """Three episodes at once: their turns share batches, and each is one sequence with its program's reward."""
    dialogues, tokenizer = dialogues_of("Qwen 2.5")

    def answer(prompt: str, number: int) -> str:
        results = prompt.count("<tool_response>")
        call = {"name": "multiply", "arguments": {"a": 4, "b": 3} if results else {"a": 4}}
        return "12" if results == 2 else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    engines = TextEngines(tokenizer, answer, end=FAMILIES["Qwen 2.5"].end)
    rows = [{"columns": {"question": f"number {number}", "answer": 11 + number}} for number in range(3)]
    requests = [GenerationRequest([1, 2], number, row=json.dumps(row)) for number, row in enumerate(rows)]
    with AgentPrograms(f"{sys.executable} {AGENT}", timeout=60, num_workers=3) as programs:
        player = ProgramPlayer(programs, dialogues, EpisodeLimits(4, 1000))
        episode_engines = MultiTurnEngines(engines, player, in_step=False)  # type: ignore[arg-type]
        found = asyncio.run(generate(episode_engines, requests, SamplingParams(50)))
    episodes = [response.episode for response in found]
    assert [one and (len(one.turns), one.earlier, one.turn_rewards) for one in episodes] == [
        (3, (), (0.0, 0.0, reward)) for reward in (0.0, 1.0, 0.0)
    ]
    assert sum(map(len, engines.batches)) == 9
    for response in found:
        assert response.episode is not None
        ids = (response.episode.prompt_ids or []) + response.token_ids
        assert ids in [prompt + turn.token_ids for prompt, turn in engines.sampled]
