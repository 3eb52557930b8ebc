"""File environments in real processes: isolated, killable, silent, and stopped with their owner."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from scoring import is_alive, wait_until
from sent_actions import SentActions

from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset, Text
from rlhf_cli.backends.rollout.processes import process_tree
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.errors import ProcessDied, UsageError

pytestmark = pytest.mark.usefixtures("no_process_is_left")

CALCULATOR = '''
from rlhf_cli.agents import run_python

class Environment:
    def reset(self, question, answer, **row):
        self.answer, self.done, self.reward = answer, False, 0.0

    def calculate(self, program: str, seconds: float = 60.0) -> str:
        """Run a Python program.

        Args:
            program: prints its result.
            seconds: its limit."""
        return run_python(program, timeout=seconds)

    def submit(self, result: str) -> str:
        """Hand in the answer.

        Args:
            result: a number."""
        self.done, self.reward = True, float(result.strip() == self.answer)
        return "done"
'''

MOODS = """
import os, signal, subprocess, sys, time

class Moods:
    def reset(self, kind="", note="", **row):
        self.texts, self.note = [], note
        print("a print of reset", flush=True)
        self.act(kind)

    def step(self, text):
        self.texts.append(text)
        self.act(text)
        return f"{os.getpid()} {' '.join(self.texts)}", 1.0, False

    def act(self, kind):
        if kind in ("child", "child and hang", "child and die"):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(self.note, "a") as note:
                note.write(f"{child.pid} ")
        if kind in ("hang", "child and hang"):
            time.sleep(600)
        if kind == "hold the lock":
            import re
            re.match(r"(a+)+$", "a" * 60 + "b")
        if kind in ("die", "child and die"):
            os._exit(3)
        if kind == "die alone":  # a forked child keeps the socket open
            if os.fork() == 0:
                time.sleep(600)
            os._exit(4)
        if kind == "print":
            os.write(1, b"raw text\\\\n")
            print('{"observations": ["forged"]}')
        if kind == "raise":
            raise ValueError("a mood")
        if kind == "large":
            self.texts.append("x" * 5_000_000)
"""


@pytest.fixture
def moods(tmp_path: Path) -> Path:
    path = tmp_path / "moods.py"
    path.write_text(MOODS)
    return path


class SentEnvironments(SentActions, FileEnvironments): ...


def opened(path: Path, *, timeout: float = 60.0, num_workers: int = 8) -> SentEnvironments:
    return SentEnvironments(str(path), timeout=timeout, num_workers=num_workers)


def ask(environments: SentEnvironments, episode: int, action: Action) -> Reply:
    """Return the reply to an action while no other is in flight."""
    environments.send(episode, action)
    ((answered, reply),) = environments.collect()
    assert answered == episode
    return reply


def collected(environments: SentEnvironments, count: int) -> dict[int, Reply]:
    """Return this many replies, by episode."""
    replies: dict[int, Reply] = {}
    while len(replies) < count:
        replies |= dict(environments.collect())
    return replies


def seen(reply: Reply) -> str:
    """Return the texts that a process received, without its number."""
    assert reply.failure is None, reply
    return reply.observations[0].partition(" ")[2]


def test_a_calculator_runs_programs_and_gets_its_reward(tmp_path: Path) -> None:
    path = tmp_path / "calculator.py"
    path.write_text(CALCULATOR)
    with opened(path) as environments:
        described = environments.description
        assert described.about == "Environment of calculator.py: tools calculate, submit"
        assert [tool["function"]["name"] for tool in described.tools] == ["calculate", "submit"]
        with pytest.raises(UsageError, match="needs the column 'answer' in reset; the row has question, prompt"):
            environments.check_columns(["question", "prompt"])
        environments.check_columns(["question", "answer"])
        assert ask(environments, 7, Reset({"question": "2+3", "answer": "5"}, 1)) == Reply()
        asked: list[dict[str, Any]] = [
            {"program": "print(2+3)"},
            {"program": "print(1)\n1/0"},
            {"program": "while 1: 1", "seconds": 0.5},
        ]
        calls = Calls(tuple(ToolCall("calculate", arguments) for arguments in asked))
        right, wrong, endless = ask(environments, 7, calls).observations
        assert right == "5\n"
        assert wrong.startswith("1\nTraceback")
        assert wrong.endswith("ZeroDivisionError: division by zero\n")
        assert endless == "Error: the program ran for more than 0.5 s."
        submitted = ask(environments, 7, Calls((ToolCall("submit", {"result": " 5"}),)))
        assert submitted == Reply(("done",), reward=1.0, is_done=True)
        assert ask(environments, 7, Finish()) == Reply(is_done=True)


def test_episodes_are_separate_and_more_than_there_are_workers(moods: Path) -> None:
    with opened(moods, num_workers=3) as environments:
        for episode in range(40):
            environments.send(episode, Reset({}, episode))
        collected(environments, 40)
        for turn in range(3):
            for episode in range(40):
                environments.send(episode, Text(f"{episode}.{turn}"))
            replies = collected(environments, 40)
        assert [seen(replies[episode]) for episode in range(40)] == [f"{n}.0 {n}.1 {n}.2" for n in range(40)]
        assert len({reply.observations[0].split()[0] for reply in replies.values()}) == 40
        assert len(process_tree(os.getpid())) == 41
        for episode in range(40):
            environments.end(episode)
        wait_until(lambda: len(process_tree(os.getpid())) == 1)


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("die", "exited with code 3"),
        ("die alone", "exited with code 4"),
        ("raise", "raised ValueError: a mood (moods.py, line 35)"),
    ],
)
def test_an_environment_that_breaks_fails_alone(moods: Path, kind: str, failure: str) -> None:
    with opened(moods) as environments:
        ask(environments, 0, Reset({}, 0))
        begun = ask(environments, 1, Reset({"kind": kind}, 0))
        assert replace(begun, trace="") == Reply(failure=failure)
        assert ('raise ValueError("a mood")' in begun.trace) == (kind == "raise")
        ask(environments, 2, Reset({}, 0))
        assert replace(ask(environments, 2, Text(kind)), trace="") == Reply(failure=failure)
        assert seen(ask(environments, 0, Text("fine"))) == "fine"
        assert ask(environments, 1, Reset({}, 0)) == Reply()  # the same episode starts again
        assert seen(ask(environments, 1, Text("again"))) == "again"


@pytest.mark.parametrize("kind", ["hang", "hold the lock"])
def test_an_environment_that_hangs_is_killed_at_its_limit(moods: Path, kind: str) -> None:
    with opened(moods, timeout=0.5) as environments:
        environments.send(0, Reset({"kind": kind}, 0))
        assert environments.collect() == [(0, Reply(failure="ran out of time (0.5 s) in reset", is_late=True))]
        assert ask(environments, 0, Text("")) == Reply(failure="ran out of time (0.5 s) in reset")
        wait_until(lambda: len(process_tree(os.getpid())) == 1)


def test_orders_that_wait_for_others_do_not_run_out_of_time(moods: Path) -> None:
    with opened(moods, timeout=0.4, num_workers=1) as environments:
        for episode in range(3):
            environments.send(episode, Reset({"kind": "hang"}, 0))
        failures = [reply.failure for reply in collected(environments, 3).values()]
        assert failures == ["ran out of time (0.4 s) in reset"] * 3


def test_a_process_that_is_killed_from_outside_is_noticed_in_use_and_idle(moods: Path) -> None:
    killed = Reply(failure="was killed by SIGKILL (out of memory?)")
    with opened(moods) as environments:
        ask(environments, 0, Reset({}, 0))
        ask(environments, 1, Reset({}, 0))
        idle, busy = (int(ask(environments, episode, Text("")).observations[0].split()[0]) for episode in (0, 1))
        os.kill(idle, signal.SIGKILL)
        environments.send(1, Text("hang"))
        os.kill(busy, signal.SIGKILL)
        assert environments.collect() == [(1, killed)]
        wait_until(lambda: not psutil.pid_exists(idle))
        assert ask(environments, 0, Text("")) == killed


@pytest.mark.parametrize("kind", ["child and hang", "child and die", "child"])
def test_children_of_an_environment_are_killed_with_it(moods: Path, tmp_path: Path, kind: str) -> None:
    note = tmp_path / "pids"
    with opened(moods) as environments:
        environments.send(0, Reset({"kind": kind, "note": str(note)}, 0))
        wait_until(lambda: note.exists() and note.read_text().endswith(" "))
        if kind != "child and hang":
            environments.collect()
        environments.end(0)
        wait_until(lambda: not is_alive(int(note.read_text())))


def test_prints_and_large_answers_do_not_disturb(moods: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with opened(moods) as environments:
        ask(environments, 0, Reset({"note": "y" * 5_000_000}, 0))
        assert seen(ask(environments, 0, Text("print"))) == "print"
        assert len(seen(ask(environments, 0, Text("large")))) > 5_000_000
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "a print of reset" in printed.err


def test_an_episode_that_is_ended_never_replies(moods: Path) -> None:
    with opened(moods) as environments:
        environments.send(0, Reset({"kind": "hang"}, 0))
        environments.send(1, Reset({}, 0))
        environments.end(0)
        assert environments.collect() == [(1, Reply())]
        assert environments.collect() == []
        environments.end(0)


CLOSED = """
import time

class Closed:
    async def reset(self, note, seconds=0):
        self.note, self.seconds = note, seconds

    def step(self, text):
        open(f"{self.note} works", "w").close()
        time.sleep(600)

    async def close(self):
        time.sleep(self.seconds)
        open(self.note, "w").close()
"""


def test_idle_environments_are_closed_within_their_limit(tmp_path: Path) -> None:
    (tmp_path / "closed.py").write_text(CLOSED)
    notes = [tmp_path / str(episode) for episode in range(4)]
    with opened(tmp_path / "closed.py") as environments:
        for episode, note in enumerate(notes):
            ask(environments, episode, Reset({"note": str(note)}, 0))
        environments.send(2, Text(""))
        wait_until((tmp_path / "2 works").exists)
        environments.end(0)
        environments.end(2)
        wait_until(notes[0].exists)
        wait_until(lambda: len(process_tree(os.getpid())) == 3)
        assert [note.exists() for note in notes] == [True, False, False, False]
    assert [note.exists() for note in notes] == [True, True, False, True]


def test_an_environment_that_does_not_close_in_time_is_killed(tmp_path: Path) -> None:
    (tmp_path / "closed.py").write_text(CLOSED)
    with opened(tmp_path / "closed.py", timeout=1.5) as environments:
        environments.send(0, Reset({"note": str(tmp_path / "note"), "seconds": 600}, 0))
        environments.collect()
    assert not (tmp_path / "note").exists()


FEW_FILES = """
import asyncio, resource, sys
from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.records import Reset

resource.setrlimit(resource.RLIMIT_NOFILE, (20, 60))
with FileEnvironments(sys.argv[1], timeout=60, num_workers=1) as environments:
    replies = [asyncio.run(environments.answer(episode, Reset({}, 0))) for episode in range(60)]
failures = [(episode, reply.failure) for episode, reply in enumerate(replies) if reply.failure]
print(20 < failures[0][0] < 60, {failure for _, failure in failures})
"""


def test_the_limit_of_open_files_is_raised_and_then_named(moods: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FEW_FILES, str(moods)], capture_output=True, text=True, cwd=ROOT)
    sentence = "needs a file descriptor, but this process is limited to 60 (ulimit -n)"
    assert done.stdout == f"True {{{sentence!r}}}\n", done.stderr


ROOT = Path(__file__).parents[3]

OWNER = """
import asyncio, sys
from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.records import Reset

environments = FileEnvironments(sys.argv[1], timeout=600, num_workers=8)
environments.__enter__()
async def begin():
    kinds = enumerate(["", "hold the lock", "child and hang"])
    await asyncio.gather(*(environments.answer(n, Reset({"kind": kind, "note": sys.argv[2]}, 0)) for n, kind in kinds))
asyncio.run(begin())
"""


def test_no_process_is_left_when_the_owner_is_killed(moods: Path, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(moods), str(note)], cwd=ROOT)
    try:
        wait_until(lambda: note.exists() and note.read_text().endswith(" "))
        others = [child.pid for child in psutil.Process(owner.pid).children(recursive=True)]
        assert len(others) == 5  # the server, three environments, and a child of one of them
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in others))


def test_the_end_of_the_server_ends_the_run_and_all_environments(moods: Path) -> None:
    with opened(moods) as environments:
        ask(environments, 0, Reset({}, 0))
        environments.send(0, Text("hang"))
        server, child = sorted(process_tree(os.getpid()), key=lambda process: process.ppid() != os.getpid())
        server.kill()
        with pytest.raises(ProcessDied, match="the environment fork server was killed by SIGKILL"):
            environments.collect()
    wait_until(lambda: not is_alive(child.pid))


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, name='beat', daemon=True).start()\n"
TOOL = "class Tool:\n    def reset(self): ...\n    def use(self): ...\n"
GAME = "class {name}:\n    def reset(self): ...\n    def step(self, text): return text, 0, True\n"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("class Environment", "is not valid Python: line 1: expected ':'"),
        ("import nowhere", "raised ModuleNotFoundError: No module named 'nowhere' (bad.py, line 1)"),
        ("x = 1", "has no class Environment, and no other class with reset and public methods"),
        ("Environment = print", "has Environment, but it is not a class"),
        (GAME.format(name="A") + GAME.format(name="B"), "has more than one class with reset: A, B; pass FILE.py:A"),
        (
            TOOL,
            "has Tool.use, which cannot be a tool: Cannot generate JSON schema for use because",
        ),
        ("import os; os._exit(5)", "exited with code 5 while it was loading"),
        (THREAD + GAME.format(name="A"), "starts the thread 'beat' during import; start it in reset"),
    ],
    ids=["syntax", "import", "no class", "function", "two classes", "no docstring", "exit", "thread"],
)
def test_a_file_that_is_no_environment_is_refused(tmp_path: Path, source: str, sentence: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(UsageError) as refused, opened(path):
        pass
    assert str(refused.value).startswith(f"--environment {path} {sentence}")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.py: there is no such file"), opened(tmp_path / "no.py"):
        pass
    with pytest.raises(UsageError, match=rf"{tmp_path} is a folder: pass a file in it, {tmp_path}/FILE\.py$"):
        opened(tmp_path).__enter__()


def test_a_class_is_chosen_by_its_name(tmp_path: Path) -> None:
    several = tmp_path / "several.py"
    several.write_text(GAME.format(name="A") + GAME.format(name="B") + "from collections import OrderedDict\n")
    with opened(Path(f"{several}:B")) as environments:
        assert environments.description.about == "B of several.py: step reads the text of each turn"
        assert environments.description.tools == ()
    with pytest.raises(UsageError, match="has no class C; classes: A, B"), opened(Path(f"{several}:C")):
        pass
