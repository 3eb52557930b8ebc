"""The Python interface: its names, signatures and exceptions, and runs as objects."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_recorded_runs import add_run

import rlhf_cli
from rlhf_cli.command_table import TRAINING

SETTINGS = {"pretrain": "models/tiny", "dataset": "rows.jsonl"}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Replace the interpreter that runs commands: it copies the settings, prints two lines and exits."""

    def install(status: int) -> Path:
        copied, script = tmp_path / "given.yaml", tmp_path / "python"
        script.write_text(f'#!/bin/sh\necho "$3"\ncp "$5" {copied}\necho "rlhf sft: the end" >&2\nexit {status}\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return copied

    return install


def test_the_package_has_a_function_for_every_training_command():
    functions = {name.replace("+", "") for name in TRAINING} | {"generate", "eval"}
    assert set(dir(rlhf_cli)) == functions | {"Run", "RunError", "UsageError", "__version__"}
    assert all(callable(getattr(rlhf_cli, name)) for name in functions)
    with pytest.raises(AttributeError, match="no attribute 'sgd'"):
        rlhf_cli.sgd  # noqa: B018


def test_signatures_have_every_flag_with_its_default():
    parameters = inspect.signature(rlhf_cli.sft).parameters
    assert list(parameters)[:3] == ["pretrain", "dataset", "output"]
    assert parameters["pretrain"].default is inspect.Parameter.empty
    assert parameters["max_epochs"].default == 2
    assert "    max_epochs: Epochs over the data" in str(rlhf_cli.sft.__doc__)
    assert inspect.signature(rlhf_cli.reinforce).parameters["baseline"].default == "none"


def test_importing_the_package_imports_nothing_else():
    code = (
        "import sys, rlhf_cli; from rlhf_cli import errors; print('rlhf_cli.api' in sys.modules, 'yaml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_invalid_settings_are_found_before_the_process_starts(program):
    copied = program(0)
    with pytest.raises(rlhf_cli.UsageError, match=r"unknown setting max_epoch \(did you mean max_epochs\?\)"):
        rlhf_cli.sft(**SETTINGS, output="runs/x", max_epoch=1)
    assert not copied.exists()


def test_settings_reach_the_command_and_its_run_is_returned(program, tmp_path, capsys):
    copied, folder = program(0), add_run(tmp_path / "run", close="finished")
    run = rlhf_cli.sft(**SETTINGS, output=folder, lora_rank=8, target_modules=["q_proj", "v_proj"], eval_dataset=None)
    given = {"output": str(folder), "lora_rank": 8, "target_modules": ["q_proj", "v_proj"], "eval_dataset": None}
    assert yaml.safe_load(copied.read_text()) == SETTINGS | given
    assert capsys.readouterr().out == "sft\nrlhf sft: the end\n"
    assert run.folder == folder


@pytest.mark.parametrize(
    ("status", "error"), [(1, rlhf_cli.RunError), (2, rlhf_cli.UsageError), (-9, rlhf_cli.RunError)]
)
def test_a_failed_command_raises_its_last_line(program, tmp_path, status, error):
    program(status % 256)
    with pytest.raises(error, match=r"^the end$"):
        rlhf_cli.sft(**SETTINGS, output=tmp_path / "run")


def test_an_interrupted_command_interrupts(program, tmp_path):
    program(130)
    with pytest.raises(KeyboardInterrupt):
        rlhf_cli.sft(**SETTINGS, output=tmp_path / "run")


def test_a_run_reads_its_folder(tmp_path):
    run = rlhf_cli.Run(add_run(tmp_path / "run", close="finished", lora_rank=4))
    assert repr(run) == f"<sft run {str(tmp_path / 'run')!r}: finished, step 3/10>"
    assert [(row["step"], row["loss"]) for row in run.metrics] == [(1, 8.0), (2, 4.0), (3, 8.0 / 3)]
    assert run.metrics[1]["eval/loss"] == 5.0
    assert run.settings["lora_rank"] == 4
    assert run.status().state == "finished"
    assert run.model == tmp_path / "run" / "model"
    assert (run.alarms, list(run.samples()), list(run.eval_samples())) == ([], [], [])
    with pytest.raises(rlhf_cli.UsageError, match="only runs of rlhf eval have results"):
        run.results  # noqa: B018


def test_a_model_saved_elsewhere_is_found(tmp_path):
    run = rlhf_cli.Run(add_run(tmp_path / "run", close="finished", save_path=str(tmp_path / "final")))
    assert run.model == tmp_path / "final"


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(rlhf_cli.UsageError, match=r"run\.json cannot be read"):
        rlhf_cli.Run(tmp_path)
