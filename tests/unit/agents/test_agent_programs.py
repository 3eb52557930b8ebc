"""Agent programs in real processes: their input, exit, and leftover processes."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from agent_fakes import TextEngines, dialogues_of
from model_templates import FAMILIES
from scoring import is_alive, wait_until

from rlhf_cli.agents.agent_process import ProgramEnd
from rlhf_cli.agents.agent_programs import AgentPrograms, Asked, Ended, Started
from rlhf_cli.agents.chat_records import Choice, Completion, Refused
from rlhf_cli.data.formats.conversations import Message
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.errors import LONGEST_REASON, UsageError
from rlhf_cli.trainers.online.agent_episodes import AgentEngines
from rlhf_cli.trainers.online.episodes import EpisodeLimits

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


def next_event(programs: AgentPrograms):
    """Return the next event other than a start."""
    left = vars(programs).setdefault("left_of_test", [])
    while not left:
        left += [event for event in programs.collect(30) if not isinstance(event, Started)]
    return left.pop(0)


def end_of(command: str, row: Mapping[str, object] | None = None) -> ProgramEnd:
    """Run a program, answer all its requests, and return how it ended."""
    with AgentPrograms(command, timeout=30, num_workers=1) as programs:
        programs.start(0, row or {})
        while isinstance(event := next_event(programs), Asked):
            programs.answer(event.ticket, ANSWER)
        return event.end


def test_a_program_gets_its_row_asks_and_ends_with_a_reward(tmp_path):
    command = program(tmp_path, "print('a log'); print(json.dumps({'reward': len(ask(row['question']))}))")
    with AgentPrograms(command, timeout=30, num_workers=1) as programs:
        programs.start(5, {"question": "why? é"})
        asked = next_event(programs)
        assert (asked.episode, asked.request.messages) == (5, (Message("user", "why? é"),))
        programs.answer(asked.ticket, ANSWER)
        assert next_event(programs) == Ended(5, ProgramEnd(5.0))


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
    with AgentPrograms(program(tmp_path, text), timeout=2.5, num_workers=1) as programs:
        programs.start(0, {"file": str(tmp_path / "pid")})
        asked = next_event(programs)
        assert programs.collect(2.7) == []
        programs.answer(asked.ticket, ANSWER)
        assert next_event(programs).end.failure == "sent no request and did not exit within 2.5 s"
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_settings_of_sampling_are_reported_once_and_programs_can_be_started_again(tmp_path, caplog):
    command = program(tmp_path, "ask('x', temperature=2); ask('y', temperature=2); print(json.dumps({'reward': 1.0}))")
    programs = AgentPrograms(command, timeout=30, num_workers=1)
    for _ in range(2):
        with programs:
            programs.start(0, {})
            for _ in range(2):
                programs.answer(next_event(programs).ticket, ANSWER)
            assert next_event(programs) == Ended(0, ProgramEnd(1.0))
    assert [record.message for record in caplog.records if "temperature" in record.message] == [
        "the agent program sets temperature, which is ignored: turns use the run's settings"
    ]


def test_an_episode_that_is_given_up_leaves_no_process_and_its_request_no_answer(tmp_path):
    text = "print(os.getpid(), file=open(row['file'], 'w'), flush=True); ask('x')"
    with AgentPrograms(program(tmp_path, text), timeout=30, num_workers=1) as programs:
        programs.start(0, {"file": str(tmp_path / "pid")})
        asked = next_event(programs)
        programs.end(0)
        wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
        programs.answer(asked.ticket, ANSWER)  # too late, and ignored
        programs.start(1, {"file": str(tmp_path / "pid")})
        assert next_event(programs).episode == 1  # no further events from the first program


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
    with AgentPrograms(program(tmp_path, text), timeout=30, num_workers=1) as programs:
        programs.start(0, {"file": str(seen)})
        assert next_event(programs) == Ended(0, ProgramEnd())
        (tmp_path / "seen.go").touch()
        wait_until(lambda: seen.exists() and seen.read_text() == "401\n")
        assert programs.collect(0.0) == []


def test_no_more_processes_run_than_are_allowed(tmp_path):
    command = program(tmp_path, "ask('x'); print(json.dumps({'reward': 1.0}))")
    with AgentPrograms(command, timeout=30, num_workers=2) as programs:
        for episode in range(3):
            programs.start(episode, {})
        waiting = [next_event(programs), next_event(programs)]
        assert {event.episode for event in waiting} == {0, 1}
        programs.answer(waiting[0].ticket, Refused("no"))  # the program fails, which frees a slot
        last = [next_event(programs), next_event(programs)]
        assert [type(event) for event in last] == [Ended, Asked]
        assert last[1].episode == 2


DRIVER = """
import sys
from rlhf_cli.agents.agent_programs import AgentPrograms
programs = AgentPrograms(sys.argv[1], timeout=600, num_workers=1).__enter__()
programs.start(0, {"file": sys.argv[2]})
programs.collect(600)
programs.collect(600)
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
        played = AgentEngines(engines, programs, dialogues, EpisodeLimits(4, 1000))  # type: ignore[arg-type]
        found = played.generate(requests, SamplingParams(50))
    episodes = [response.episode for response in found]
    assert [one and (len(one.turns), one.earlier, one.turn_rewards) for one in episodes] == [
        (3, (), (0.0, 0.0, reward)) for reward in (0.0, 1.0, 0.0)
    ]
    assert sum(map(len, engines.batches)) == 9
    for response in found:
        assert response.episode is not None
        ids = (response.episode.prompt_ids or []) + response.token_ids
        assert ids in [prompt + turn.token_ids for prompt, turn in engines.sampled]
