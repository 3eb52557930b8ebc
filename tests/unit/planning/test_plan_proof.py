"""`rlhf plan --proof RUN`: planned values beside those in the metrics of a run."""

import json

import pytest
from plans import SMALL, plan_of

from rlhf_cli import cli
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.options import build_config, to_yaml
from rlhf_cli.runs.plan_proof import record_plan

STEP = {"num_sequences": 8.0, "num_tokens": 800.0, "memory/host_gib": 2.0, "time/train": 2.0, "time/step": 2.5}


def written_run(folder, command, config, *steps):
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "run.json").write_text(json.dumps({"command": command}))
    lines = [json.dumps({"step": number, **metrics}) for number, metrics in enumerate(steps, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def proof(capsys, *words):
    status = cli.main(["plan", "--proof", *map(str, words)])
    found = capsys.readouterr()
    return status, found.out, found.err


def rows(out):
    """Return (planned, measured, difference in percent) by name."""
    lines = [line for line in out.splitlines() if line.endswith(" %")]
    return {line[:24].strip(): tuple(map(float, line[24:].removesuffix(" %").split())) for line in lines}


def test_a_run_on_a_gpu_is_compared_by_memory_and_phase(capsys, tmp_path):
    config = build_config(SFTConfig, {"pretrain": SMALL, "dataset": "x", "output": "x", "param_dtype": "bf16"})
    steps = [STEP | {"memory/gpu_gib_max": 40.0, "time/train": seconds} for seconds in (9.0, 2.0, 2.2)]
    run = written_run(tmp_path / "run", "sft", config, *steps)
    status, out, err = proof(capsys, run, "--gpu", "h100", "--row_tokens", "100")
    assert (status, err) == (0, "")
    plan = plan_of("sft", pretrain=SMALL, row_tokens=100)
    found = rows(out)
    assert found["train, s"][:2] == pytest.approx((plan.times["train"].seconds, 2.2), abs=0.01)  # the median
    planned = (plan.peak - plan.gpus[0].phases["train"]["processes"]) / 2**30
    assert found["training, GiB of a GPU"] == pytest.approx((planned, 40.0, 100 * (planned / 40 - 1)), abs=0.6)
    assert found["host memory, GiB"][1] == 2.0
    as_json = json.loads(proof(capsys, run, "--gpu", "h100", "--row_tokens", "100", "--json")[1])
    assert as_json["values"]["train, s"] == pytest.approx([plan.times["train"].seconds, 2.2])
    assert as_json["plan"]["hardware"] == "1 x H100 (79 GiB)"


def test_an_online_run_has_the_lengths_that_it_measured(capsys, tmp_path, monkeypatch):
    values = {"pretrain": SMALL, "prompt_data": "x", "output": "x", "reward_funcs": "math", "param_dtype": "bf16"}
    run = written_run(
        tmp_path / "grpo",
        "grpo",
        build_config(GRPOConfig, values),
        STEP | {"response_length": 100.0, "time/generate": 5.0},
        STEP | {"response_length": 300.0, "time/generate": 7.0},
    )
    monkeypatch.chdir(tmp_path)  # a folder may have the name of a command
    found = rows(proof(capsys, run.name, "--gpu", "h100", "--num_gpus", "8")[1])
    plan = plan_of("grpo", pretrain=SMALL, num_gpus=8, response_tokens=200)
    assert found["generate, s"][:2] == pytest.approx((plan.times["generate"].seconds, 6.0), abs=0.01)
    assert "forward, s" not in found  # not measured


def test_a_run_on_a_cpu_keeps_the_memory_that_it_was_planned_for(capsys, tmp_path, monkeypatch):
    config = build_config(SFTConfig, {"pretrain": SMALL, "dataset": "x", "output": "x", "param_dtype": "bf16"})
    run = written_run(tmp_path / "run", "sft", config, STEP)
    monkeypatch.setattr("rlhf_cli.planning.hardware.usable_memory", lambda: 32 * 2**30)
    record_plan(run, {"row_tokens": 100})
    monkeypatch.setattr("rlhf_cli.planning.hardware.usable_memory", lambda: 640 * 2**30)
    assert "this CPU" in proof(capsys, run)[1]
    assert "cores, 32 GiB)" in proof(capsys, run)[1]


def test_a_folder_without_a_run_is_named(capsys, tmp_path):
    status, out, err = proof(capsys, tmp_path)
    assert (status, out) == (2, "")
    assert f"--proof {tmp_path}: not a run directory, it has no readable run.json" in err
    config = build_config(SFTConfig, {"pretrain": SMALL, "dataset": "x", "output": "x"})
    run = written_run(tmp_path / "run", "sft", config)
    assert "the run has completed no step" in proof(capsys, run)[2]
