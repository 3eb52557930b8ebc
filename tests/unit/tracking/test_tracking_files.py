"""The files of a run, and that a resumed run writes the same."""

import io
import json
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.models.vision.pictures import Picture
from rlhf_cli.tracking.figures import interval, is_measured, prominent
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.tracking.services import TensorBoardSink
from rlhf_cli.tracking.sinks import (
    SINKS,
    JsonLines,
    MetricsFile,
    SamplesFile,
    files_of,
    read_lines,
    read_metrics,
    truncate_after,
)
from rlhf_cli.tracking.summary import summarise
from rlhf_cli.tracking.tracker import SilentTracker, Tracker

PLAIN = TrackingConfig(use_tensorboard=False)


def make_tracker(output: Path, *, resume_step: int | None = None, shown: io.StringIO | None = None) -> Tracker:
    console = Console(file=shown or io.StringIO(), width=200)
    return Tracker(PLAIN, output, command="ppo", total_steps=6, console=console, resume_step=resume_step)


def report_step(tracker: Tracker, step: int) -> None:
    tracker.log(step, {"loss": 1.0 / step, "num_tokens": 10.0 * step}, {"train": 0.5, "generate": 1.5})
    tracker.samples(step, [{"prompt": "p", "response": f"r{step}.{i}", "reward": i / 7} for i in range(2)])
    if step % 2 == 0:
        tracker.evaluation(step, {"loss": 2.0 / step})


def reproducible_lines(output: Path) -> list[dict]:
    return [
        {key: value for key, value in line.items() if not is_measured(key)}
        for line in read_lines(output / "metrics.jsonl")
    ]


def test_resumed_run_leaves_the_files_of_a_run_never_stopped(tmp_path):
    never_stopped = make_tracker(tmp_path / "whole")
    for step in range(1, 7):
        report_step(never_stopped, step)
    never_stopped.close()

    killed = make_tracker(tmp_path / "killed")
    for step in range(1, 6):
        report_step(killed, step)
    with (tmp_path / "killed" / "metrics.jsonl").open("ab") as torn:
        torn.write(b'{"step": 6, "loss": 0.1')
    resumed = make_tracker(tmp_path / "killed", resume_step=2)
    for step in range(3, 7):
        report_step(resumed, step)
    resumed.close()

    assert len(reproducible_lines(tmp_path / "whole")) == 9
    assert reproducible_lines(tmp_path / "killed") == reproducible_lines(tmp_path / "whole")
    samples = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("whole", "killed")]
    assert samples[0] == samples[1]
    assert samples[0].count(b"\n") == 12


def test_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    metrics = MetricsFile(tmp_path, resume_step=None)
    metrics.log(1, {"loss": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'


def test_fresh_start_keeps_nothing_of_an_earlier_run(tmp_path):
    report_step(make_tracker(tmp_path), 1)
    make_tracker(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert (tmp_path / "samples.jsonl").read_bytes() == b""


def test_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert list(read_lines(path)) == [{"step": 1, "loss": 3.0}]


def test_complete_line_that_is_not_json_is_an_error_not_a_gap(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        read_metrics(tmp_path)


def test_truncating_replaces_the_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 2, "eval/loss": 1}\n{"step": 3}\n{"st')
    before = path.stat().st_ino
    truncate_after(path, 2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 2, "eval/loss": 1}\n'
    assert path.stat().st_ino != before
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    metrics = MetricsFile(tmp_path, resume_step=None)
    metrics.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
        "d": 1.5,
    }
    back = read_metrics(tmp_path)[1]
    assert math.isnan(back["a"])
    assert (back["b"], back["c"], back["d"]) == (math.inf, -math.inf, 1.5)


def test_samples_keep_texts_as_they_are_and_have_null_for_numbers_that_are_not_finite(tmp_path):
    row = {"response": 'NaN\u2028\n"</script>', "reward": math.nan, "parts": {"length": -math.inf, "exact": 1.0}}
    SamplesFile(tmp_path, resume_step=None).write(4, [row])
    expected = {**row, "step": 4, "reward": None, "parts": {"length": None, "exact": 1.0}}
    assert list(read_lines(tmp_path / "samples.jsonl")) == [expected]


def test_text_with_half_a_surrogate_pair_is_still_written(tmp_path):
    JsonLines(tmp_path / "samples.jsonl", resume_step=None).write(1, {"response": "a\ud83d"})
    assert list(read_lines(tmp_path / "samples.jsonl")) == [{"step": 1, "response": "a?"}]


def test_scalars_of_numpy_and_torch_are_logged_as_numbers(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log(1, {"loss": torch.tensor(0.25), "count": torch.tensor(3).numpy()}, {})
    assert read_metrics(tmp_path)[1]["loss"] == 0.25
    assert read_metrics(tmp_path)[1]["count"] == 3


def test_speed_is_tokens_over_the_time_spent_in_phases(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log(1, {"num_tokens": 300.0}, {"train": 0.5, "generate": 1.0})
    logged = read_metrics(tmp_path)[1]
    assert logged["perf/tokens_per_second"] == 200.0
    assert logged["time/train"] == 0.5
    assert logged["memory/host_gib"] > 0.01


def test_memory_that_the_trainer_reports_replaces_what_the_tracker_measures(tmp_path):
    make_tracker(tmp_path).log(1, {"memory/host_gib": 123.0, "memory/gpu_gib_max": 70.0}, {})
    logged = read_metrics(tmp_path)[1]
    assert (logged["memory/host_gib"], logged["memory/gpu_gib_max"]) == (123.0, 70.0)


def test_start_up_before_the_first_phase_is_no_part_of_the_first_step(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.start({})
    tracker._last_log -= 1000.0  # a startup of a quarter of an hour
    timer = PhaseTimer(on_change=tracker.phase)
    with timer("train"):
        pass
    tracker.log(1, {}, timer.take())
    tracker._last_log -= 500.0  # time between phases
    with timer("train"):
        pass
    tracker.log(2, {}, timer.take())
    logged = read_metrics(tmp_path)
    assert logged[1]["time/step"] < 100.0
    assert logged[2]["time/step"] > 500.0


def test_metric_that_is_not_finite_is_said_once(tmp_path):
    shown = io.StringIO()
    tracker = make_tracker(tmp_path, shown=shown)
    for step in (1, 2):
        tracker.log(step, {"loss": math.nan}, {})
    assert shown.getvalue().count("Warning: loss is nan in step 1") == 1
    assert "Warning: loss is nan in step 2" not in shown.getvalue()


def test_summary_adds_up_phases_and_keeps_first_and_last(tmp_path):
    metrics = MetricsFile(tmp_path, resume_step=None)
    metrics.log(1, {"loss": 4.0, "num_tokens": 100.0, "time/train": 1.0, "time/step": 1.5})
    metrics.log(2, {"loss": 2.0, "num_tokens": 200.0, "time/train": 1.0, "time/step": 1.0})
    metrics.log(2, {"eval/loss": 3.0})
    summary = summarise(tmp_path)
    assert summary.phases == {"train": 2.0, "other": 0.5}
    assert summary.seconds == 2.5
    assert summary.tokens_per_second == 150.0
    assert (summary.first["loss"], summary.last["loss"]) == (4.0, 2.0)
    assert summary.last["eval/loss"] == 3.0


def test_nested_phases_count_for_themselves_alone():
    now = iter(range(100))
    running: list[str | None] = []
    timer = PhaseTimer(clock=lambda: float(next(now)), on_change=running.append)
    with timer("outer"), timer("inner"):  # from 1 and from 2; they end at 3 and at 4
        pass
    assert timer.take() == {"outer": 2.0, "inner": 1.0}
    assert timer.take() == {}
    assert running == ["outer", "inner", "outer", None]


def test_phase_that_fails_is_still_counted():
    now = iter(range(100))
    timer = PhaseTimer(clock=lambda: float(next(now)))
    with pytest.raises(ValueError, match="no"), timer("train"):
        raise ValueError("no")
    assert timer.take() == {"train": 1.0}


def test_silent_tracker_takes_everything_a_tracker_takes():
    public = {name for name in vars(Tracker) if not name.startswith("_")}
    assert public == {name for name in vars(SilentTracker) if not name.startswith("_")}


def scalar(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_of_a_resumed_run_shows_each_step_once(tmp_path):
    first = TensorBoardSink(tmp_path, resume_step=None)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=1)
    for step in (2, 3):
        second.log(step, {"loss": 10.0 * step})
    second.close()
    assert scalar(tmp_path / "tensorboard", "loss") == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_sinks_list_every_file_that_they_write(tmp_path):
    enabled = TrackingConfig(**{row.setting: True for row in SINKS if row.setting and row.files})
    with Tracker(
        enabled, tmp_path, command="ppo", total_steps=2, console=Console(file=io.StringIO()), resume_step=None
    ) as tracker:
        report_step(tracker, 2)
        tracker.log(3, {"grad_norm": 1.0, "approx_k3": 1.0}, {})  # an alarm
        image = Picture("a1", 8, 8, partial(np.zeros, (8, 8, 3), np.uint8))
        tracker.evaluation_samples(2, [{"response": "r", "images": [image]}])
        tracker.close()
    written = {path.name for path in tmp_path.iterdir()} - {"run.json"}
    assert written == set(files_of(SINKS)), "files of a row in SINKS (tracking/sinks.py) differ from those it writes"


def test_run_file_says_what_ran_and_how_it_ended(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.start({"Model": "tiny"})
    assert yaml.safe_load((tmp_path / "run.json").read_text())["outcome"] == "running"
    with pytest.raises(ValueError, match="no"), tracker:
        raise ValueError("no")
    said = json.loads((tmp_path / "run.json").read_text())
    assert said == {
        "command": "ppo",
        "unit": "step",
        "total_steps": 6,
        "folder": os.getcwd(),
        "facts": {"Model": "tiny"},
        "outcome": "failed",
    }


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_folder_is_named_where_it_is_kept(tmp_path, is_kept):
    (tmp_path / "logs").mkdir()
    shown = io.StringIO()
    make_tracker(tmp_path, shown=shown).start({"Model": "tiny"}, is_kept=is_kept)
    assert shown.getvalue().count(str(tmp_path)) == (2 if is_kept else 0)


def test_the_time_of_evaluations_is_a_phase_of_its_own_and_no_training(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.evaluation(0, {"accuracy": 0.25}, {"eval": 2.0})
    tracker.log(1, {"num_tokens": 60.0}, {"train": 3.0})
    tracker.evaluation(1, {"accuracy": 0.5}, {"eval": 4.0})
    tracker.close()
    summary = summarise(tmp_path)
    assert (summary.num_steps, summary.phases["eval"], summary.phases["train"]) == (1, 6.0, 3.0)
    assert summary.tokens_per_second == pytest.approx(20.0)
    steps = read_metrics(tmp_path)
    assert (steps[0]["eval/accuracy"], steps[0]["time/eval"], steps[1]["time/eval"]) == (0.25, 2.0, 4.0)
    assert summary.seconds == pytest.approx(6.0 + steps[1]["time/step"])


def test_an_evaluation_says_the_interval_behind_its_metric(tmp_path):
    shown = io.StringIO()
    tracker = make_tracker(tmp_path, shown=shown)
    tracker.evaluation(3, {"loss": 0.65, "accuracy": 0.63, "accuracy_low": 0.57, "accuracy_high": 0.69})
    assert "accuracy 0.6300 (0.5700 to 0.6900)" in shown.getvalue()


def test_ends_of_intervals_stand_behind_their_value_and_not_apart():
    names = ["eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "clip_low"]
    assert prominent(names) == ["eval/accuracy", "clip_low"]
    metrics = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.25, "eval/accuracy_high": 0.75}
    assert interval("eval/accuracy", metrics) == " (0.2500 to 0.7500)"
    assert interval("clip", {"clip_low": 0.1}) == ""
