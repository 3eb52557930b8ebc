"""Tests of `make gpu-check` without a GPU: its command lines parse, and its table shows the result of each command."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from test_docs_parse import check

from rlhf_cli import cli
from rlhf_cli.commands.plan import PLANNED

REPOSITORY = Path(__file__).parents[2]
NUM_STEPS = 10


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))


def load(name):
    return importlib.import_module(name)


def all_steps(folder):
    return load("gpu_check").steps(load("gpu_check").Files(folder / "model", folder / "rows.jsonl", folder / "out"))


def check_tests(words):
    """Check that the files exist and the project defines the marker."""
    files = [word for word in words if word.endswith(".py")]
    assert files
    assert all((REPOSITORY / file).exists() for file in files), files
    assert words[words.index("-m") + 1] in ("gpu", "not gpu and not slow")


def test_there_are_ten_steps_and_every_command_line_parses(tmp_path):
    steps = all_steps(tmp_path)
    assert [step.number for step in steps] == list(range(1, NUM_STEPS + 1))
    for command in (command for step in steps for command in step.commands):
        words = list(command.words)
        if words[:2] == ["-m", "rlhf_cli"]:
            check(words[2:])
        elif words[:2] == ["-m", "pytest"]:
            check_tests(words[2:])
        else:
            assert words[0] == "benchmarks/gpu.py"
            load("gpu").parser().parse_args(words[1:])


def write_architecture(folder):
    """Write the config.json of the model that the check creates."""
    words = load("gpu_check").MODEL.split()
    sizes = {name.removeprefix("--"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "tie_word_embeddings": True, **sizes}))


def test_every_training_and_inference_command_is_planned_for_one_h100_and_fits(tmp_path, capsys):
    write_architecture(tmp_path / "model")
    lines = [command.words[2:] for step in all_steps(tmp_path) for command in step.commands]
    planned = [words for words in lines if words[0] in PLANNED]
    assert {words[0] for words in planned} == {"sft", "grpo", "ppo", "generate"}
    for words in planned:
        assert cli.main(["plan", *words, "--gpu", "h100", "--num_gpus", "1", "--json"]) in (None, 0), words
        plan = json.loads(capsys.readouterr().out)
        assert plan["fits"], words
        (gpu,) = plan["gpus"]
        assert gpu["count"] == 1
        # Forecasts of an iteration leave time for startup within the limit of the command.
        assert sum(plan["seconds"].values()) < 60, words


def test_the_table_has_the_plan_of_a_command_with_what_it_measured(tmp_path, monkeypatch):
    write_architecture(tmp_path / "model")
    gpu_check = load("gpu_check")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "#### 2"}\n' * 64)
    sft = next(command for command in all_steps(tmp_path)[2].commands if "sft" in command.words)
    plan = gpu_check.planned(sft, "--gpu", "h100", "--num_gpus", "1")
    found = re.fullmatch(r"GPU memory at most ([\d.]+) GiB, ([\d.]+) s an iteration", plan)
    assert found is not None, plan
    # 187M parameters with Adam need 16 bytes each: 2.8 GiB, and 16,384 tokens a micro-batch at most 20 times that.
    assert 2.8 < float(found[1]) < 56
    assert gpu_check.planned(gpu_check.Command(("-m", "rlhf_cli", "doctor"), 1, str)) == ""
    assert gpu_check.planned(gpu_check.Command(("-m", "rlhf_cli", "sft", "--nothing"), 1, str)).startswith("no plan: ")
    monkeypatch.setattr(gpu_check, "planned", lambda command: plan)
    (outcome,) = outcomes(step_of("print('4 s an iteration')"), tmp_path, gpu_memory=lambda: 4096)
    header, _, row = gpu_check.report([outcome]).splitlines()
    cells = dict(zip(header.split("|"), row.split("|"), strict=True))
    assert cells[" planned "].strip() == plan
    assert cells[" measured "].strip() == "4 s an iteration, GPU memory at most 4.0 GiB"


def test_every_test_of_a_gpu_is_in_a_step(tmp_path):
    words = {word for step in all_steps(tmp_path) for command in step.commands for word in command.words}
    assert {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/gpu").glob("test_*.py")} <= words


def test_a_continued_run_has_the_words_of_the_interrupted_one(tmp_path):
    first, second = all_steps(tmp_path)[8].commands
    changed = [word if word != "--overwrite" else "--load_checkpoint" for word in first.words]
    assert (tuple(changed), second.interrupt_at) == (second.words, None)
    assert first.interrupt_at.is_relative_to(first.words[first.words.index("--output") + 1])


def step_of(*sources, **changes):
    """Return a step with these Python programs."""
    gpu_check = load("gpu_check")
    made = {"seconds": 120, "figures": gpu_check.last_line} | changes
    return gpu_check.Step(4, "a step", tuple(gpu_check.Command(("-c", source), **made) for source in sources))


def outcomes(step, folder, *, gpu_memory=lambda: None):
    return list(load("gpu_check").run_step(step, folder, gpu_memory=gpu_memory))


def test_a_command_that_fails_does_not_stop_the_others_and_shows_the_end_of_its_log(tmp_path):
    failed, fine = outcomes(step_of("raise SystemExit('no such kernel')", "print('7 passed')"), tmp_path)
    assert (failed.result, failed.tail) == ("failed: status 1: no such kernel", "no such kernel")
    assert (fine.result, fine.figures, fine.tail) == ("ok", "7 passed", "")


def test_a_command_that_needs_what_is_not_installed_is_skipped_with_the_reason(tmp_path):
    (skipped,) = outcomes(step_of("print('never')", needs=("no_such_module",)), tmp_path)
    assert skipped.result == "skipped: no_such_module is not installed"
    assert not list(tmp_path.iterdir())


def test_a_command_over_its_limit_is_ended_and_fails(tmp_path):
    (late,) = outcomes(step_of("print('loading', flush=True); import time; time.sleep(60)", seconds=2), tmp_path)
    assert late.result == "failed: no end within 2 s: loading"
    assert late.seconds < 30


def test_a_command_to_be_interrupted_gets_ctrl_c_once_and_has_to_end_as_interrupted_commands_do(tmp_path):
    saved = tmp_path / "saved"
    source = f"""
import pathlib, sys, time
try:
    pathlib.Path({str(saved)!r}).touch()
    time.sleep(100)
except KeyboardInterrupt:
    sys.exit(130)
"""
    (one,) = outcomes(step_of(source, interrupt_at=saved), tmp_path)
    assert (one.result, one.figures) == ("ok", "interrupted, saved")
    (other,) = outcomes(step_of("pass", interrupt_at=tmp_path / "never"), tmp_path)
    assert other.result.startswith("failed: status 0")


def test_the_most_gpu_memory_in_use_is_a_figure(tmp_path):
    used = iter([1024, 3072, 2048])
    (one,) = outcomes(step_of("import time; time.sleep(1.2); print('ok')"), tmp_path, gpu_memory=lambda: next(used, 0))
    assert one.figures == "ok, GPU memory at most 3.0 GiB"


def test_figures_that_cannot_be_read_leave_a_command_that_succeeded_ok(tmp_path):
    figures = load("gpu_check")._metrics_of(tmp_path / "none")
    (one,) = outcomes(step_of("pass", figures=figures), tmp_path)
    assert one.result == "ok"
    assert one.figures.startswith("no figures: FileNotFoundError")


def test_the_report_has_a_row_a_command_and_neither_home_paths_nor_those_of_the_checkout(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    step = step_of("print('/home/somebody/cache a|b')", f"raise SystemExit('{REPOSITORY}/x.py fell')")
    assert load("gpu_check").check([step], tmp_path, gpu_memory=lambda: None) == 1
    text = (tmp_path / "gpu_check.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| 4. a step | ")]
    assert len(rows) == 2
    assert r"| ok |" in rows[0]
    assert r"~/cache a\|b |" in rows[0]
    assert "failed: status 1: x.py fell" in rows[1]
    assert "/home/somebody" not in text
    assert str(REPOSITORY) not in text
    assert re.search(r"commit \w+", text)
    assert text in capsys.readouterr().out


def test_findings_of_the_doctor_that_are_not_ok_are_its_figures():
    output = (
        "rlhf-cli 1\n\n| status | part | finding |\n|---|---|---|\n| ok | torch | 2 |\n| warning | nvcc | missing |"
    )
    assert load("gpu_check")._findings(output) == "2 findings; nvcc: missing"


def test_the_speed_of_a_generation_is_the_figure_of_its_summary():
    output = (
        "chunk 1/1  424 tokens/s\n\nFinished: 1/1 chunks in 38s\n  speed                424 tokens/s\n  Responses  x\n"
    )
    assert load("gpu_check")._speed(output) == "424 tokens/s"


def test_the_last_table_of_the_benchmark_is_its_figures():
    row = "| training | ZeRO-2 | 5 MFU % |"
    output = f"{row}\n\n| part | setting | figures |\n|---|---|---|\n{row}"
    assert load("gpu_check")._last_table(output) == "training: ZeRO-2: 5 MFU %"


def test_a_command_is_shown_as_it_is_typed():
    shown = [load("gpu_check").Command(tuple(shlex.split(words)), 1, str) for words in SHOWN]
    assert [command.shown for command in shown] == list(SHOWN.values())


SHOWN = {
    "-m rlhf_cli doctor": "rlhf doctor",
    "-m pytest -q": "pytest -q",
    "benchmarks/gpu.py --parts rollout": "python benchmarks/gpu.py --parts rollout",
}


def test_outputs_of_an_earlier_check_are_removed_and_its_model_is_kept(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "outputs" / "ppo").mkdir(parents=True)
    files = load("gpu_check").make_files(tmp_path)
    assert (files.model.exists(), files.outputs.exists()) == (True, False)


def test_without_a_gpu_the_check_ends_with_status_2_and_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--steps", "1", "4"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert load("gpu_check").main() == 2
    assert capsys.readouterr().err == "No NVIDIA GPU is visible to PyTorch here, so there is nothing to check.\n"
