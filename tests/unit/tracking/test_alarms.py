"""Alarms: when each rule holds and when it nearly does, and that a run reports each of them once."""

import io
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.tracking.alarms import ALARMS, WINDOW, alarms_of
from rlhf_cli.tracking.tracker import Tracker

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "alarms.md"
Columns = dict[str, list[float]]

# Alarm, columns of a history that raises it, and columns of a similar one that does not.
EXAMPLES: list[tuple[str, Columns, Columns]] = [
    ("kl-spike", {"approx_k3": [0.01, 0.41]}, {"approx_k3": [0.9, 0.39]}),
    ("kl-spike", {"kl": [1, 205], "response_length": [4, 4]}, {"kl": [1, 205], "response_length": [4, 5]}),
    ("engine-mismatch", {"rollout_k3": [0, 0.02, 0.03]}, {"rollout_k3": [0.02, 0.009, 0.03]}),
    (
        "engine-mismatch",
        {"rollout_k3_current": [0.02, 0.02], "staleness/mean": [1, 1]},
        {"rollout_k3": [0.02, 0.02], "staleness/mean": [1, 1]},
    ),
    (
        "dead-reward",
        {"frac_reward_zero_std": [0.5, 1, 1, 1], "response_length": [4, 4, 4, 4]},
        {"frac_reward_zero_std": [1, 0.99, 1, 1], "response_length": [4, 4, 4, 4]},
    ),
    (
        "dead-reward",
        {"reward_std": [0, 0, 0], "response_length": [4, 4, 4]},
        {"reward_std": [0, 0, 0]},  # a reward model in training
    ),
    (
        "length-drift",
        {"response_length": [4, 6, 5, 5, 10.1]},
        {"response_length": [4, 6, 5, 10.1]},
    ),
    ("loss-spike", {"loss": [2.0, 1.0, 1.0, 2.1]}, {"loss": [0.2, 0.1, 0.1, 0.59]}),
]


def rows(columns: Columns) -> list[dict[str, float]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def names(history: list[dict[str, float]]) -> list[str]:
    return [alarm.name for alarm in alarms_of(history)]


@pytest.mark.parametrize(("name", "unhealthy", "healthy"), EXAMPLES)
def test_a_rule_holds_beyond_its_limit_only(name: str, unhealthy: Columns, healthy: Columns):
    assert name in names(rows(unhealthy))
    assert name not in names(rows(healthy))


def test_each_alarm_has_an_example_and_a_section_of_the_page():
    assert {name for name, *_ in EXAMPLES} == {alarm.name for alarm in ALARMS}
    assert re.findall(r"^## ([a-z]+-[a-z]+)$", PAGE.read_text(), re.M) == [alarm.name for alarm in ALARMS]


def test_missing_and_broken_values_raise_neither_alarms_nor_errors():
    metrics = {name for _, *both in EXAMPLES for columns in both for name in columns}
    for values in itertools.product([None, math.nan, math.inf, -math.inf, 0.0], repeat=4):
        history = [{name: value for name in metrics if value is not None} for value in values]
        assert set(names(history)) <= {"dead-reward"}


def tracker(output: Path, *, shown: io.StringIO, heard: list[str], resume_step: int | None = None) -> Tracker:
    console = Console(file=shown, width=300)
    config = TrackingConfig(use_tensorboard=False)
    started = Tracker(
        config, output, command="grpo", total_steps=9, console=console, resume_step=resume_step, unit="iteration"
    )
    started.start({}, on_alarm=heard.append)
    return started


def recorded(output: Path) -> list[tuple[int, str]]:
    lines = map(json.loads, (output / "alarms.jsonl").read_text().splitlines())
    return [(line["step"], line["alarm"]) for line in lines]


def test_a_run_shows_records_and_reports_each_alarm_once_and_a_resumed_run_remembers(tmp_path):
    shown, heard = io.StringIO(), list[str]()
    moved = [0.01, 0.5, 0.6, 0.01, 0.5]
    first = tracker(tmp_path, shown=shown, heard=heard)
    for step, k3 in enumerate(moved, 1):
        first.log(step, {"grad_norm": 1.0, "loss": 1.0, "approx_k3": k3}, {})
    first.evaluation(5, {"approx_k3": 0.9})
    assert recorded(tmp_path) == [(2, "kl-spike")]
    (message,) = heard
    assert message == (
        "kl-spike in iteration 2: an update moved the policy by 0.5 nats per token (approx_k3, limit 0.4); "
        "lower --actor_learning_rate (docs/howto/alarms.md#kl-spike)"
    )
    assert shown.getvalue().count(f"Alarm: {message}\n") == 1

    again = tracker(tmp_path, shown=shown, heard=heard, resume_step=3)
    again.log(4, {"grad_norm": 1.0, "loss": 2.1, "approx_k3": 0.5}, {})  # the first three steps are remembered too
    assert recorded(tmp_path) == [(2, "kl-spike"), (4, "loss-spike")]

    before = tracker(tmp_path, shown=shown, heard=heard, resume_step=1)
    before.log(2, {"grad_norm": 1.0, "approx_k3": 0.5}, {})
    assert recorded(tmp_path) == [(2, "kl-spike")]


def test_rows_without_an_optimizer_step_are_not_compared(tmp_path):
    heard = list[str]()
    generated = tracker(tmp_path, shown=io.StringIO(), heard=heard)
    for step in range(1, WINDOW):
        generated.log(step, {"reward_std": 0.0, "response_length": 4.0}, {})
    assert not heard
    assert not (tmp_path / "alarms.jsonl").exists()
