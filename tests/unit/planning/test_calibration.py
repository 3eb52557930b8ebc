"""Runs record planned and measured values, and later plans are scaled by them."""

import json

import pytest
import torch
from plans import LARGE, SMALL, plan_of
from test_plan_proof import STEP, proof, rows, written_run
from viewed_runs import exported

from rlhf_cli import cli
from rlhf_cli.backends.training import memory
from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.options import build_config
from rlhf_cli.planning.calibration import append_run, calibrated, calibration_file, key_of, read_runs
from rlhf_cli.runs.plan_proof import record_plan
from rlhf_cli.tracking.view.export import write_report


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Use an empty cache folder, and return it."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.delenv("RLHF_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def run_of(plan, ratio, phase="train, s"):
    return {**key_of(plan), "values": {phase: [2.0, 2.0 * ratio]}}


def test_times_are_scaled_by_the_median_of_runs_with_the_same_key():
    plan = plan_of("sft", pretrain=SMALL)
    assert key_of(plan) == {"hardware": "H100", "command": "sft", "engine": None, "dtype": "bf16", "size": 9}
    unlike = [run_of(other, 9.0) for other in (plan_of("dpo", pretrain=SMALL), plan_of("sft", pretrain=LARGE))]
    runs = [run_of(plan, ratio) for ratio in (1.0, 3.0, 1.5)]
    found = calibrated(plan, [*unlike, *runs])
    assert found.times["train"].seconds == pytest.approx(1.5 * plan.times["train"].seconds)
    assert (found.num_calibrating, calibrated(plan, unlike)) == (3, plan)
    # A phase that no run measured keeps its forecast.
    assert calibrated(plan, [run_of(plan, 3.0, "generate, s")]).times == plan.times


def test_the_file_keeps_its_newer_half_and_damaged_lines_are_skipped(own_cache, monkeypatch):
    file = calibration_file()
    assert file == own_cache / "rlhf-cli" / "calibration.jsonl"
    assert read_runs(file) == []
    monkeypatch.setenv("RLHF_CALIBRATION", str(own_cache / "chosen.jsonl"))
    assert calibration_file() == own_cache / "chosen.jsonl"
    for number in range(40):
        append_run({"number": number, "values": {"long": "x" * 50_000}}, file)
    assert file.stat().st_size <= 1 << 20
    with file.open("a") as lines:
        lines.write('{"torn\n[1]\n')
    numbers = [run["number"] for run in read_runs(file)]
    assert numbers == list(range(numbers[0], 40))
    assert 10 <= len(numbers) <= 20


def sft_run(folder, num_steps, **values):
    given = {"pretrain": SMALL, "dataset": "x", "output": "x", "param_dtype": "fp32"} | values
    return written_run(folder, "sft", build_config(SFTConfig, given), *[STEP] * num_steps)


def test_a_run_records_its_plan_in_its_folder_its_report_and_the_calibration(tmp_path, capsys):
    run = sft_run(tmp_path / "run", 3)
    record_plan(run, {"row_tokens": 124, "num_processes": 1})
    written = json.loads((run / "plan.json").read_text())
    assert "124 tokens per sequence" in written["assumed"]
    planned, measured = written["values"]["train, s"]
    assert measured == 2.0  # in each step
    (line,) = read_runs(calibration_file())
    assert line["values"]["train, s"] == [planned, measured]
    (shown,) = exported(write_report(run))["runs"]
    assert shown["plan"]["values"]["train, s"] == [planned, measured]
    # The lengths of the run are used again.
    status, out, _ = proof(capsys, run)
    assert (status, "124 tokens per sequence" in out.splitlines()[0]) == (0, True)
    words = ["plan", "sft", "--pretrain", SMALL, "--param_dtype", "fp32", "--host_memory_gib", "500"]
    cli.main(words)
    assert "(forecast, calibrated by 1 run on this machine)" in capsys.readouterr().out
    cli.main([*words, "--no_calibration"])
    assert "(forecast)" in capsys.readouterr().out


def test_a_short_run_calibrates_nothing_and_a_plan_that_fails_is_logged(tmp_path, capsys, monkeypatch):
    record_plan(sft_run(tmp_path / "short", 2), {})
    assert (tmp_path / "short" / "plan.json").is_file()
    assert read_runs(calibration_file()) == []
    record_plan(sft_run(tmp_path / "unknown", 3, pretrain=str(tmp_path / "nowhere")), {})
    assert "the plan of this run was not recorded" in capsys.readouterr().err
    assert exported(write_report(tmp_path / "unknown"))["runs"][0]["plan"] == {}
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    record_plan(sft_run(tmp_path / "run", 3), {})
    assert "the plan of this run was not recorded: [Errno" in capsys.readouterr().err


def test_peaks_of_phases_are_compared_with_their_plan(tmp_path, capsys, monkeypatch):
    """Peaks in GiB: a forward pass 3 of 4 reserved, training 5 of 6, and training again 2 of 2."""
    peaks = iter([(4, 3), (6, 5), (2, 2)])
    monkeypatch.setattr(memory, "_peaks", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def note(phase):
        reserved, allocated = next(peaks)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: reserved << 30)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocated << 30)
        memory.note_peak(phase)

    note("forward")
    note("train")
    first = memory.peak_gpu_memory()
    assert first == {"memory/gpu_gib_max": 6, "memory/forward_gib_max": 3, "memory/train_gib_max": 5}
    note("train")
    assert memory.peak_gpu_memory() == {**first, "memory/gpu_gib_max": 2, "memory/train_gib_max": 2}
    values = {"pretrain": LARGE, "dataset": "x", "output": "x", "param_dtype": "bf16"}
    run = written_run(tmp_path / "run", "sft", build_config(SFTConfig, values), STEP | first)
    found = rows(proof(capsys, run, "--gpu", "h200")[1])
    parts = plan_of("sft", gpu="h200").gpus[0].phases["train"]
    planned = (sum(parts.values()) - parts["processes"]) / 2**30
    assert found["tensors in training, GiB"][:2] == pytest.approx((planned, 5.0), abs=0.01)
    assert "tensors in forward, GiB" not in found  # sft has no forward pass without gradients
