"""`rlhf runs`: the state of real and killed runs, broken folders, and commands that resume."""

import io
import json
import os
import shlex
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from settings_files import from_yaml

from rlhf_cli import cli
from rlhf_cli.backends.process.output_lock import output_lock
from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.options import to_yaml, typer_command
from rlhf_cli.runs.recorded_runs import find_runs, read_run
from rlhf_cli.runs.run_list import age
from rlhf_cli.tracking.tracker import Tracker

KILLED = """
import os, signal, sys
from pathlib import Path
from rlhf_cli.backends.process.output_lock import output_lock
with output_lock(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def add_run(root: Path, *, steps: int = 3, close: str = "", output: Path | None = None, **settings: Any) -> Path:
    """Write what a run of 10 steps writes until it ends with outcome `close`, or is killed without one."""
    root.mkdir(parents=True)
    values = {"pretrain": "models/tiny", "dataset": "d.jsonl", "output": str(output or root), **settings}
    config = SFTConfig(
        **{
            group: {name: value for name, value in values.items() if name in SFTConfig.supported(group)}
            for group in SFTConfig.model_fields
        }
    )
    (root / "config.yaml").write_text(to_yaml(config))
    console = Console(file=io.StringIO())
    plain = TrackingConfig(use_tensorboard=False)
    tracker = Tracker(plain, root, command="sft", total_steps=10, console=console, resume_step=None)
    tracker.start({})
    for step in range(1, steps + 1):
        tracker.log(step, {"loss": 8.0 / step, "grad_norm": 1.0, "lr": 0.1, "num_tokens": 9.0}, {"train": 1.0})
        if step == 2:
            tracker.evaluation(step, {"loss": 5.0, "num_rows": 3.0})
    if close:
        tracker.close(outcome=close)
    return root


def lock(root: Path, pid: int, host: str, *, seconds_ago: float = 0.0) -> None:
    """Write the lock file of a process that has not released it."""
    file = root / ".lock"
    file.write_text(json.dumps({"pid": pid, "host": host}))
    then = file.stat().st_mtime - seconds_ago
    os.utime(file, (then, then))


def silence(root: Path, seconds: float) -> None:
    for path in root.rglob("*"):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def test_the_main_metrics_of_the_last_step_and_evaluation_are_read(tmp_path):
    run = read_run(add_run(tmp_path / "run", close="finished"))
    assert (run.command, run.model, run.state, run.step, run.total_steps) == ("sft", "models/tiny", "finished", 3, 10)
    assert run.metrics == {"loss": 8 / 3, "grad_norm": 1.0, "eval/loss": 5.0}
    assert run.resume == ""


def test_half_a_last_line_of_a_killed_run_is_ignored(tmp_path):
    root = add_run(tmp_path / "run")
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0, "time/step": 2')
    assert read_run(root).step == 3


@pytest.mark.parametrize(("outcome", "state"), [("interrupted", "stopped"), ("failed", "failed"), ("", "killed")])
def test_states_of_runs_that_have_ended(tmp_path, outcome: str, state: str):
    assert read_run(add_run(tmp_path / "run", close=outcome)).state == state


def test_a_run_is_running_while_its_process_holds_the_lock(tmp_path):
    root = add_run(tmp_path / "run")
    with output_lock(root):
        assert read_run(root).state == "running"
    # The same process goes on, but has released the folder.
    assert read_run(root).state == "killed"


def test_a_run_that_starts_in_the_folder_of_a_finished_one_is_running(tmp_path):
    root = add_run(tmp_path / "run", close="finished")
    with output_lock(root):
        assert read_run(root).state == "running"


def test_a_run_whose_process_was_killed(tmp_path):
    root = add_run(tmp_path / "run")
    subprocess.run([sys.executable, "-c", KILLED, str(root)], check=False)
    assert json.loads((root / ".lock").read_text())["pid"] != os.getpid()
    assert read_run(root).state == "killed"


def test_a_later_process_with_the_number_of_a_killed_one_is_not_the_run(tmp_path):
    root = add_run(tmp_path / "run")
    lock(root, os.getpid(), os.uname().nodename, seconds_ago=1e8)
    assert read_run(root).state == "killed"


@pytest.mark.parametrize(("seconds", "state"), [(0, "running"), (1000, "unknown")])
def test_a_run_of_another_host_counts_as_running_while_it_writes(tmp_path, seconds: float, state: str):
    root = add_run(tmp_path / "run")
    lock(root, os.getpid(), "elsewhere")
    silence(root, seconds)
    assert read_run(root).state == state


def test_runs_are_found_in_subfolders_the_newest_first(tmp_path):
    old, new = add_run(tmp_path / "a" / "old", close="failed"), add_run(tmp_path / "new", close="failed")
    silence(old, 100)
    # A model may hold the record of the run that made it.
    (new / "model").mkdir()
    (new / "model" / "run.json").write_text("{}")
    runs, skipped = find_runs(tmp_path)
    assert ([run.folder for run in runs], skipped) == ([new, old], [])


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("run.json", '{"command": "sft"', "run.json cannot be read (JSONDecodeError)"),
        ("run.json", "[1]", "run.json holds no settings"),
        ("run.json", '{"command": "jog"}', "run.json was not written by rlhf"),
        ("run.json", '{"command": "sft"}', " has broken files (KeyError: 'total_steps')"),
        ("config.yaml", "a: [", "config.yaml cannot be read (ParserError)"),
        ("config.yaml", None, "config.yaml cannot be read (No such file or directory)"),
        ("metrics.jsonl", '"time/step" broken\n', " has broken files (JSONDecodeError"),
    ],
)
def test_broken_and_foreign_folders_are_skipped_with_a_sentence(tmp_path, file: str, text: str | None, reason: str):
    root = add_run(tmp_path / "run")
    (root / file).unlink() if text is None else (root / file).write_text(text)
    runs, skipped = find_runs(tmp_path)
    assert runs == []
    assert len(skipped) == 1
    assert str(root) in skipped[0]
    assert reason in skipped[0]


def parsed(line: str) -> SFTConfig:
    """Return the settings that the command line of a run sets."""
    rlhf, command, *words = shlex.split(line)
    configs: list[SFTConfig] = []
    typer_command(command, SFTConfig, configs.append, words).main(words, standalone_mode=False)
    assert rlhf == "rlhf"
    return configs[0]


def add_checkpoint(root: Path) -> None:
    with CheckpointStore(root / "checkpoints", max_num=1).writing(3, {}, needed_bytes=0) as folder:
        (folder / "weights").write_bytes(b"w")


def test_the_command_that_resumes_has_the_settings_of_the_run(tmp_path):
    with chdir(tmp_path):
        root = add_run(Path("runs/a run"), close="interrupted", overwrite=True, seed=7)
        add_checkpoint(root)
        run = read_run(root)
        assert run.checkpoint == 3
        assert run.resume == "rlhf sft --config 'runs/a run/config.yaml' --load_checkpoint --no_overwrite"
        own = from_yaml(SFTConfig, root / "config.yaml")
        assert parsed(run.resume) == own.updated({"load_checkpoint": True, "overwrite": False})


def test_the_command_changes_to_the_folder_in_which_the_run_was_started(tmp_path):
    with chdir(tmp_path):
        add_run(Path("run"), close="failed")
    run = read_run(tmp_path / "run")
    assert run.resume == f"cd {tmp_path} && rlhf sft --config {tmp_path}/run/config.yaml --load_checkpoint"


def test_a_moved_run_is_resumed_in_its_new_folder(tmp_path):
    with chdir(tmp_path):
        add_run(Path("old"), close="failed").rename("new")
        assert read_run(Path("new")).resume == "rlhf sft --config new/config.yaml --output new --load_checkpoint"


def test_a_run_with_a_best_model_but_no_checkpoint_starts_again(tmp_path):
    with chdir(tmp_path):
        root = add_run(Path("run"), close="failed", load_checkpoint=True)
        (root / "best").mkdir()
        (root / "best" / "best.json").write_text('{"iteration": 2}')
        line = read_run(root).resume
        assert line == "rlhf sft --config run/config.yaml --overwrite --no_load_checkpoint"
        assert parsed(line).checkpoint.overwrite


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1.0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (200_000, "2 d")]
)
def test_age(seconds: float, text: str):
    assert age(seconds) == text


def printed(capsys, *words: str) -> str:
    assert cli.main(["runs", *words]) == 0
    return capsys.readouterr().out


def test_the_table_and_the_json_object(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    add_run(Path("failed"), close="failed")
    message = "loss-spike in step 3: loss is 9"
    Path("failed/alarms.jsonl").write_text(json.dumps({"step": 3, "alarm": "loss-spike", "message": message}) + "\n")
    text = printed(capsys)
    assert text.splitlines()[0].split() == ["run", "command", "model", "state", "progress", "age", "last", "metrics"]
    assert text.splitlines()[1].split()[:6] == ["failed", "sft", "models/tiny", "failed", "step", "3/10"]
    assert "loss 2.667, gradient norm 1, evaluation loss 5" in text
    assert text.splitlines()[-2] == f"failed: alarm {message}"
    assert text.splitlines()[-1] == "failed: rlhf sft --config failed/config.yaml --load_checkpoint"
    found = json.loads(printed(capsys, ".", "--json"))
    assert found["skipped"] == []
    assert {"folder": "failed", "state": "failed", "step": 3, "alarms": [message]}.items() <= found["runs"][0].items()


def test_a_folder_without_runs_and_a_missing_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert printed(capsys) == "no runs in .\n"
    assert cli.main(["runs", "nowhere"]) == 2
    assert capsys.readouterr().err == "rlhf runs: nowhere: there is no such folder\n"
    with pytest.raises(UsageError, match="no such folder"):
        find_runs(Path("nowhere"))


def test_a_list_imports_nothing_heavy(tmp_path):
    add_run(tmp_path / "run")
    code = (
        "import sys; from rlhf_cli import cli; cli.main(['runs', sys.argv[1]]); "
        "print({'torch', 'ray', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("name", ["samples.jsonl", "logs/rank0.log"])
def test_every_file_a_run_writes_counts_as_a_sign_of_life(tmp_path, name: str):
    root = add_run(tmp_path / "run")
    silence(root, 1000)
    before = read_run(root).changed
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("")
    assert read_run(root).changed > before + 900
