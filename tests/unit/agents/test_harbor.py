"""Task folders of Harbor: read, refused, and run with a stand-in for docker that starts no containers."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scoring import wait_until
from sent_actions import SentActions

from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.harbor import reward_of, task_class
from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset
from rlhf_cli.config.episodes import EpisodeConfig, environment_kind
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.data.reading.harbor import read_task
from rlhf_cli.data.reading.sources import first_rows, load_rows
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.records import BadResult

TEST = """#!/bin/bash
if [ "$(cat sum.txt)" = "$EXPECTED" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0.25 > /logs/verifier/reward.txt
fi
exit 7
"""
# A container is a folder; absolute paths in commands and copied files are moved into it.
DOCKER = f"""#!{sys.executable}
import json, os, pathlib, shutil, subprocess, sys
state = pathlib.Path({{state!r}})
words = sys.argv[1:]
with (state / "log").open("a") as log:
    log.write(json.dumps(words) + "\\n")

def moved(text, root):
    for folder in ("/tests", "/logs"):
        text = text.replace(folder, f"{{root}}{{folder}}")
    return text

match words:
    case ["version"]:
        if (state / "down").exists():
            sys.exit("Cannot connect to the Docker daemon")
    case ["image", "inspect", tag]:
        sys.exit(not (state / tag).exists())
    case ["build", "--tag", tag, folder]:
        if "fail" in pathlib.Path(folder, "Dockerfile").read_text():
            print("step 1\\nERROR: failed to build")
            sys.exit(1)
        shutil.copytree(folder, state / tag)
    case ["run", *options, "--entrypoint", "cat", image]:
        root = state / options[options.index("--name") + 1]
        if not (state / image).exists():
            sys.exit(f"Unable to find image {{image}}")
        shutil.copytree(state / image, root / "app")
        # As in the server of docker, which outlives a killed client: the end of its input ends the container.
        server = f"import shutil, sys; sys.stdin.read(); shutil.rmtree({{str(root)!r}}, ignore_errors=True)"
        subprocess.run([sys.executable, "-c", server], start_new_session=True)
    case ["exec", *others]:
        while others[0].startswith("--"):
            others = others[2:]
        name, *command = others
        root = state / name
        if not (root / "app").exists():
            sys.exit(1)
        command = [moved(word, root) for word in command]
        sys.exit(subprocess.run(command, cwd=root / "app").returncode)
    case ["cp", source, target]:
        name, _, folder = target.partition(":")
        shutil.copytree(source, f"{{state}}/{{name}}{{folder}}")
        for path in pathlib.Path(f"{{state}}/{{name}}{{folder}}").iterdir():
            path.write_text(moved(path.read_text(), state / name))
    case ["rm", "--force", name]:
        shutil.rmtree(state / name, ignore_errors=True)
"""


class SentEnvironments(SentActions, FileEnvironments): ...


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on the path. Returns the folder with its state."""
    state, programs = tmp_path / "state", tmp_path / "programs"
    for folder in (state, programs):
        folder.mkdir()
    program = programs / "docker"
    program.write_text(DOCKER.replace("{state!r}", repr(str(state))).replace("{{", "{").replace("}}", "}"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return state


def write_task(folder: Path, config: str = "", *, dockerfile: str = "FROM ubuntu:24.04\nWORKDIR /app\n") -> Path:
    for name, text in {
        "task.toml": config or 'schema_version = "1.4"\n[verifier]\nenv = { EXPECTED = "5" }\n',
        "instruction.md": "Write the sum of 2 and 3 into sum.txt.\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": TEST,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def played(docker: Path) -> Iterator[SentEnvironments]:
    with SentEnvironments("harbor:docker?command_timeout=2", timeout=60, num_workers=4) as environments:
        yield environments


def ask(environments: SentEnvironments, episode: int, action: Action) -> Reply:
    environments.send(episode, action)
    ((_, reply),) = environments.collect()
    return reply


def run(command: str) -> Calls:
    return Calls((ToolCall("run", {"command": command}),))


def commands(state: Path) -> list[list[str]]:
    return [*map(json.loads, (state / "log").read_text().splitlines())]


def test_tasks_are_rows_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / name)
    rows = load_rows(f"harbor:{tmp_path}", split="train", seed=0)
    assert [dict(row) for row in rows] == [
        {
            "question": "Write the sum of 2 and 3 into sum.txt.",
            "task": str(tmp_path / name),
            "data_source": f"harbor/{name}",
        }
        for name in ("a", "b")
    ]
    assert rows[1].where == f"harbor:{tmp_path} b"
    (source,) = first_rows(f"harbor:{tmp_path / 'b'}", split="train")
    assert len(source) == 1


def test_limits_users_and_variables_become_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "yes")
    task = read_task(
        write_task(
            tmp_path,
            """
            [agent]
            user = "worker"
            timeout_sec = 100
            [verifier]
            user = 0
            env = { LEVEL = "${MISSING:-2}" }
            [environment]
            docker_image = "python:3.12"
            cpus = 2
            memory_mb = 512
            workdir = "/work"
            network_mode = "no-network"
            env = { ANSWER = "${GIVEN}", PLAIN = "a b" }
            """,
        )
    )
    assert task.image == "python:3.12"
    limits = ("--cpus", "2", "--workdir", "/work", "--memory", "512m", "--network", "none")
    assert (task.options, task.variables) == (limits, {"ANSWER": "yes", "PLAIN": "a b"})
    assert (task.user, task.verifier_user, task.verifier_variables) == ("worker", "0", {"LEVEL": "2"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[[steps]]\nname = 'a'", "task.toml: steps is not supported: the task has several steps"),
        ("[environment]\ngpus = 1", "task.toml: environment.gpus is not supported: the task requires GPUs"),
        ("[environment]\nenv = ['A=1']", r"task.toml: environment.env must be a table, not \['A=1'\]"),
        ("[environment]\nmemory_mb = '2G'", "environment.memory_mb must be a number, not '2G'"),
        ("[environment]\nallow_internet = 'no'", "environment.allow_internet must be true or false, not 'no'"),
        ("[verifier]\nuser = ['a']", "verifier.user must be a user's name or number"),
        ("[environment]\nos = 'windows'", "environment.os must be linux"),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment_mode must be shared"),
        ("[environment]\nnetwork_mode = 'allowlist'", "the network is public or no-network"),
        ("[environment]\nenv = { A = '${NO_SUCH_VARIABLE}' }", "needs the environment variable NO_SUCH_VARIABLE"),
        ("[environment", "task.toml: Expected ']'"),
        ("environment = 3", r"task.toml: environment must be a table, as in \[environment\]"),
    ],
)
def test_tasks_that_would_run_differently_are_refused(tmp_path: Path, config: str, message: str) -> None:
    write_task(tmp_path, config)
    with pytest.raises(UsageError, match=message):
        read_task(tmp_path)


def test_incomplete_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither the folder nor a folder in it has a task\.toml"):
        load_rows(f"harbor:{tmp_path}", split="train", seed=0)
    write_task(tmp_path)
    (tmp_path / "tests" / "test.sh").unlink()
    with pytest.raises(UsageError, match=r"tests/test\.sh: there is no such file"):
        read_task(tmp_path)
    (tmp_path / "instruction.md").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match=r"instruction\.md: is not UTF-8 text"):
        read_task(tmp_path)
    (tmp_path / "instruction.md").write_text(" \n")
    with pytest.raises(UsageError, match=r"instruction\.md: is empty"):
        read_task(tmp_path)
    (tmp_path / "instruction.md").unlink()
    with pytest.raises(UsageError, match=r"instruction\.md: No such file"):
        read_task(tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "reward"),
    [
        ("1\n", "reward.txt", 1.0),
        ('{"reward": 0.5, "style": 1}', "reward.json", 0.5),
        ('{"accuracy": 0.75}', "reward.json", 0.75),
        ("2", "reward.json", 2.0),
    ],
)
def test_the_reward_is_the_number_in_the_file(text: str, name: str, reward: float) -> None:
    assert reward_of(text, name) == reward


@pytest.mark.parametrize(
    ("text", "name"), [("", "reward.txt"), ('{"a": 1, "b": 2}', "reward.json"), ("true", "reward.json")]
)
def test_a_file_without_one_number_is_refused(text: str, name: str) -> None:
    with pytest.raises(BadResult, match=f"wrote no number as a reward into {name}"):
        reward_of(text, name)


@pytest.mark.usefixtures("no_process_is_left")
def test_the_model_runs_commands_and_the_tests_reward_the_result(
    tmp_path: Path, docker: Path, played: SentEnvironments
) -> None:
    row: dict[str, Any] = {"question": "", "task": str(write_task(tmp_path / "task"))}
    assert [tool["function"]["name"] for tool in played.description.tools] == ["run"]
    for episode in (0, 1):
        assert ask(played, episode, Reset(row, 0)) == Reply()
    assert ask(played, 0, run("echo $((2 + 3)) > sum.txt; ls")).observations == ("Dockerfile\nsum.txt\n",)
    # Another episode has another container.
    assert ask(played, 1, run("cat sum.txt")).observations == (
        "cat: sum.txt: No such file or directory\nError: exit code 1.",
    )
    assert ask(played, 1, run("sleep 9")).observations == ("Error: the command ran for more than 2 s.",)
    long = ask(played, 1, run("yes | head -c 20000000")).observations[0]
    assert long.endswith("[19,996,000 more characters]\n")
    assert len(long) < 4100
    # A reward that the model writes itself is removed.
    assert ask(played, 1, run("mkdir -p /logs/verifier; echo 9 > /logs/verifier/reward.json")).failure is None
    assert ask(played, 0, Finish()) == Reply(reward=1.0, is_done=True)
    assert ask(played, 1, Finish()) == Reply(reward=0.25, is_done=True)
    # Variables are passed on by name, and their values are in no list of processes.
    tests = next(words for words in commands(docker) if "--env" in words)
    assert tests[:3] == ["exec", "--env", "EXPECTED"]
    # Both episodes share one image.
    assert [words[0] for words in commands(docker)].count("build") == 1
    played.close()
    assert {path.name for path in docker.iterdir()} == {"log", *(path.name for path in docker.glob("rlhf-harbor*"))}


@pytest.mark.usefixtures("no_process_is_left")
def test_a_container_ends_with_a_process_that_is_killed(tmp_path: Path, docker: Path) -> None:
    row = {"task": str(write_task(tmp_path / "task"))}
    with SentEnvironments("harbor:docker?command_timeout=60", timeout=5, num_workers=1) as environments:
        ask(environments, 0, Reset(row, 0))
        late = ask(environments, 0, run("sleep 50"))
        assert late.is_late
    wait_until(lambda: not [path for path in docker.glob("rlhf-*") if "harbor" not in path.name])


def test_an_image_that_cannot_be_built_fails_the_episode(tmp_path: Path, played: SentEnvironments) -> None:
    row = {"task": str(write_task(tmp_path / "task", dockerfile="FROM fail"))}
    failure = ask(played, 0, Reset(row, 0)).failure
    assert failure == f"could not build the image of {tmp_path / 'task'}: ERROR: failed to build"


def test_a_missing_program_server_or_parameter_is_named(docker: Path) -> None:
    with pytest.raises(BadResult, match="is neither harbor:docker nor harbor:podman"):
        task_class("local")
    with pytest.raises(BadResult, match=r"has no parameter 'timeout' \(did you mean command_timeout"):
        task_class("docker?timeout=3")
    (docker / "down").touch()
    with pytest.raises(BadResult, match="cannot start containers: Cannot connect to the Docker daemon"):
        task_class("docker")


def test_the_kind_and_the_identity() -> None:
    assert environment_kind("harbor:docker") == "harbor"
    found = EpisodeConfig(environment="harbor:docker").identity(max_len=100)
    assert found["environment"] == "harbor:docker"


def _has_image(program: str) -> bool:
    inspected = [program, "image", "inspect", "ubuntu:24.04"]
    return shutil.which(program) is not None and subprocess.run(inspected, capture_output=True).returncode == 0


@pytest.mark.parametrize("program", ["docker", "podman"])
@pytest.mark.parametrize(("command", "reward"), [("echo $((2 + 3)) > sum.txt", 1.0), ("echo 4 > sum.txt", 0.25)])
def test_a_task_in_a_real_container(tmp_path: Path, program: str, command: str, reward: float) -> None:
    if not _has_image(program):
        pytest.skip(f"{program} has no image ubuntu:24.04")
    with SentEnvironments(f"harbor:{program}?command_timeout=5", timeout=120, num_workers=1) as environments:
        ask(environments, 0, Reset({"task": str(write_task(tmp_path / "task"))}, 0))
        assert "more than 5 s" in str(ask(environments, 0, run("sleep 30")))
        ask(environments, 0, run(command))
        assert ask(environments, 0, Finish()).reward == reward


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_the_real_program_has_all_options(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    limits = ["--cpus", "2", "--workdir", "/w", "--memory", "512m", "--network", "none", "--env", "A"]
    for words in (
        ["run", "--rm", "--interactive", "--init", "--name", "n", *limits, "--entrypoint", "cat"],
        ["exec", "--user", "root", "--env", "A"],
        ["build", "--tag", "rlhf-harbor:a"],
        ["rm", "--force"],
    ):
        # With --help, it parses the options and needs no server.
        done = subprocess.run([program, *words, "--help"], capture_output=True, text=True)
        assert (done.returncode, "Usage:" in done.stdout) == (0, True), done.stderr


@pytest.mark.skipif(importlib.util.find_spec("harbor") is None, reason="harbor requires Python 3.12: unpack its wheel")
def test_the_packages_own_task_is_read() -> None:
    spec = importlib.util.find_spec("harbor")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    task = read_task(Path(spec.submodule_search_locations[0]) / "cli" / "template-task")
    assert (task.image, task.options, task.user, task.verifier_variables) == (None, (), "", {})
