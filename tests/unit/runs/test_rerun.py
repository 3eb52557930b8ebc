"""`rlhf rerun`: comparison of metrics, samples and tensors with hand-made differences, and refusals."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from rlhf_cli import cli
from rlhf_cli.options import to_yaml
from rlhf_cli.runs import rerun
from rlhf_cli.runs.rerun import followed
from rlhf_cli.runs.run_comparison import Difference, MetricsComparison, first_sample_difference, model_difference
from rlhf_cli.runs.run_lock import write_lock

METRICS: list[dict[str, object]] = [
    {"step": 1, "loss": 2.5, "kl": "NaN", "time/step": 1.0},
    {"step": 2, "loss": 1.5, "kl": 0.0, "time/step": 1.0},
    {"step": 2, "eval/loss": 3.0},
    {"step": 3, "loss": 0.5, "kl": 0.0, "time/step": 1.0},
]


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def compared(
    folder: Path, *, until: float = math.inf, changes: Mapping[int, dict[str, object]] = {}
) -> MetricsComparison:
    """Compare METRICS with the same after changes to lines by number."""
    other = [{**line, "time/step": 9.0} | changes.get(number, {}) for number, line in enumerate(METRICS)]
    write_lines(folder / "old" / "metrics.jsonl", METRICS)
    write_lines(folder / "new" / "metrics.jsonl", other)
    return MetricsComparison(folder / "old", folder / "new", until=until)


def test_equal_metrics_may_differ_in_time_and_nan_equals_nan(tmp_path):
    comparison = compared(tmp_path)
    assert comparison.first_difference() is None
    assert comparison.num_values == 7


def test_one_bit_of_a_metric_is_a_difference(tmp_path):
    one_bit_more = math.nextafter(1.5, 2)
    comparison = compared(tmp_path, changes={1: {"loss": one_bit_more}, 3: {"loss": 9.0}})
    assert comparison.first_difference() == Difference(2, "loss 1.5 -> 1.5000000000000002")


def test_a_missing_metric_is_a_difference_and_many_are_counted(tmp_path):
    extra: dict[str, object] = {f"m{number}": 1.0 for number in range(7)}
    difference = compared(tmp_path, changes={0: extra}).first_difference()
    assert difference == Difference(1, ", ".join(f"m{n} missing -> 1.0" for n in range(5)) + " and 2 other metrics")


def test_a_step_is_compared_once_the_next_one_has_begun(tmp_path):
    comparison = compared(tmp_path, changes={2: {"eval/loss": 4.0}})
    # Step 2 is the last one of the run in progress, so its evaluation may still follow.
    assert comparison.first_difference(before=2) is None
    assert comparison.first_difference(before=3) == Difference(2, "evaluation loss 3.0 -> 4.0")


def test_steps_after_the_last_one_to_compare_do_not_count(tmp_path):
    assert compared(tmp_path, until=2, changes={3: {"loss": 9.0}}).first_difference() is None


def test_a_step_that_the_repetition_lacks_is_a_difference(tmp_path):
    comparison = compared(tmp_path)
    write_lines(tmp_path / "new" / "metrics.jsonl", METRICS[:1])
    assert comparison.first_difference() == Difference(
        2, "loss 1.5 -> missing, KL from reference 0.0 -> missing, evaluation loss 3.0 -> missing"
    )


ENDLESS_RUN = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
with open(sys.argv[1], "w") as file:
    for step in range(1, 4):
        print(json.dumps({"step": step, "loss": 3.5 - step, "kl": "NaN", "time/step": 1.0}), file=file, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("last", "difference"),
    [(math.inf, Difference(2, "KL from reference 0.0 -> nan, evaluation loss 3.0 -> missing")), (1, None)],
)
def test_a_repetition_is_stopped_at_a_difference_and_after_the_last_step(tmp_path, last: float, difference):
    metrics = compared(tmp_path, until=last)
    file = tmp_path / "new" / "metrics.jsonl"
    file.unlink()
    with subprocess.Popen([sys.executable, "-c", ENDLESS_RUN, str(file)]) as process:
        assert followed(process, file.parent, metrics, last=last) == (difference, True)
    assert process.returncode == 130


def sample(number: int, **values: object) -> dict[str, object]:
    return {"step": 1 + number // 2, "id": f"d:{number}/{number}.0@0", "response": "x", "reward": 1.0, **values}


def test_the_first_sample_that_differs_is_named_with_its_keys(tmp_path):
    old = [sample(number) for number in range(4)]
    new = [*old[:3], sample(3, response="y", reward=0.0)]
    for folder, rows in (("old", old), ("new", new)):
        write_lines(tmp_path / folder / "samples.jsonl", rows)
    one, other = tmp_path / "old", tmp_path / "new"
    assert first_sample_difference(one, other, until=2) == (
        3,
        Difference(2, "sample d:3/3.0@0 differs in response, reward"),
    )
    assert first_sample_difference(one, other, until=1) == (2, None)
    write_lines(other / "samples.jsonl", old[:3])
    assert first_sample_difference(one, other, until=2) == (
        3,
        Difference(2, "sample d:3/3.0@0 is missing in the repetition"),
    )


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_first_tensor_that_differs_is_named(tmp_path):
    weights = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    old = save(tmp_path / "old", a=weights, b=torch.zeros(3), c=torch.full((1,), math.nan))
    assert (
        model_difference(old, save(tmp_path / "same", a=weights, b=torch.zeros(3), c=torch.full((1,), math.nan)))
        is None
    )
    other = save(tmp_path / "other", a=weights, b=torch.tensor([0.0, -0.25, 0.0]), c=torch.ones(1))
    assert model_difference(old, other) == "tensor b differs by up to 0.25"
    assert model_difference(old, save(tmp_path / "less", a=weights)) == "tensor b exists in one model only"
    signed = save(tmp_path / "signed", a=weights, b=torch.tensor([0.0, -0.0, 0.0]), c=torch.full((1,), math.nan))
    assert model_difference(old, signed) == "tensor b differs by up to 0"


def add_run(root: Path, *, command: str = "sft", outcome: str = "finished", folder: str = "", **settings: str) -> None:
    root.mkdir()
    facts = {"command": command, "unit": "step", "total_steps": 3, "outcome": outcome, "folder": folder}
    (root / "run.json").write_text(json.dumps(facts))
    values = {"pretrain": "tiny", "dataset": "d.jsonl", "output": str(root), **settings}
    (root / "config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
    write_lines(root / "metrics.jsonl", METRICS)
    write_lock(root, {}, {}, step=0)


def refusal(capsys, *words: str) -> str:
    assert cli.main(["rerun", *words]) == 2
    line: str = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_refusals_are_one_sentence(tmp_path, capsys):
    with chdir(tmp_path):
        add_run(Path("gone"))
        assert "gone cannot run again: " in (line := refusal(capsys, "gone"))
        assert "tiny" in line
        add_run(Path("moved"), folder="/nowhere/at/all")
        assert "the folder /nowhere/at/all, in which it was started, is gone" in refusal(capsys, "moved")
        add_run(Path("old"))
        Path("old/run.lock").unlink()
        assert refusal(capsys, "old") == "rlhf rerun: old has no run.lock: it was made by an earlier version\n"
        add_run(Path("sampled"), command="generate")
        assert "sampled is a run of rlhf generate; only training runs again: sft, rm, " in refusal(capsys, "sampled")
        add_run(Path("killed"), outcome="running")
        write_lines(Path("killed/metrics.jsonl"), METRICS[:1])
        assert "killed has no complete step" in refusal(capsys, "killed")
        assert "nowhere/run.json cannot be read" in refusal(capsys, "nowhere")
        assert "already exists" in refusal(capsys, "gone", "--output", "old")


def test_a_repetition_has_the_settings_of_the_run_without_its_folders_and_trackers(tmp_path, monkeypatch):
    monkeypatch.setattr(rerun, "check_early", lambda config: None)
    with chdir(tmp_path):
        add_run(Path("run"), folder=str(tmp_path), save_path="kept", use_mlflow="true", learning_rate="3e-4")
        again = rerun._checked(Path("run"), None, None)
    settings = yaml.safe_load(to_yaml(again.config))
    assert (settings["learning_rate"], settings["dataset"], settings["save_path"]) == (3e-4, "d.jsonl", None)
    assert (settings["output"], again.model) == (f"{tmp_path}/run.rerun", tmp_path / "kept")
    assert (settings["use_mlflow"], settings["use_tensorboard"]) == (False, False)


def test_a_run_whose_data_are_gone_is_refused(tmp_path, capsys, tiny_model_dir):
    with chdir(tmp_path):
        add_run(Path("run"), pretrain=str(tiny_model_dir))
        line = refusal(capsys, "run")
    assert line.startswith("rlhf rerun: run cannot run again: ")
    assert "d.jsonl" in line
    assert not (tmp_path / "run.rerun").exists()
