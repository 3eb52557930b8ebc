"""End-to-end test of `rlhf sft` with images, killed during a step and restarted."""

import json
import signal
from pathlib import Path

import pytest
from forked import run_rlhf
from picture_rows import write_rows
from safetensors.torch import load_file
from tiny_vision import save_tiny_vision

from rlhf_cli.backends.training.checkpoint import CheckpointStore

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 5
KILLER = """
import os, signal

class Killer:
    def __init__(self, folder, settings, step): self.is_first = step is None
    def log(self, step, metrics):
        if self.is_first and step == 4: os.kill(os.getpid(), signal.SIGKILL)
    def close(self): pass
"""
"""Tracker that kills its run after step 4 unless it was resumed from a checkpoint."""


def metrics_of(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/", "memory/"))} for line in lines]


def test_a_run_on_pictures_that_is_killed_and_continued_ends_as_one_never_stopped(tmp_path: Path) -> None:
    model = save_tiny_vision("qwen2_5_vl", tmp_path / "model")
    pictures: list[list[str]] = [["a.png"], [], ["b.jpg", "a.png"], ["b.jpg"], []]
    rows = [{"images": names, "prompt": "<image>" * len(names) + "?", "response": "!"} for names in pictures]
    data = write_rows(tmp_path, *rows)
    (tmp_path / "killer.py").write_text(KILLER)
    shape = [
        "--train_batch_size",
        2,
        "--max_epochs",
        3,
        "--max_steps",
        STEPS,
        "--save_steps",
        2,
        "--param_dtype",
        "fp32",
    ]
    words = ["sft", "--pretrain", model, "--dataset", data, *shape, "--learning_rate", 1e-2, "--output"]
    run_rlhf(*words, tmp_path / "whole")
    killed = [*words, tmp_path / "killed", "--tracker", f"{tmp_path}/killer.py:Killer"]
    run_rlhf(*killed, status=-signal.SIGKILL)
    assert CheckpointStore(tmp_path / "killed" / "checkpoints", max_num=1).steps() == [2]
    run_rlhf(*killed, "--load_checkpoint")
    assert len(metrics_of(tmp_path / "whole")) == STEPS
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")
    whole, continued, before = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "whole" / "model", tmp_path / "killed" / "model", model)
    )
    assert all(weight.equal(continued[name]) for name, weight in whole.items())
    assert any("visual" in name and not weight.equal(before[name]) for name, weight in whole.items())
