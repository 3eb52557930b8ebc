"""Checkpoints and sample files written by commit d5b8184 can be resumed and read."""

import json
from collections import Counter
from pathlib import Path

import pytest
from online_fakes import PROMPTS, Run

from rlhf_cli.config.generate import AnswersOutputConfig
from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.selection import select_samples
from rlhf_cli.runs.online.group_files import load_ahead, load_surplus
from rlhf_cli.tracking.sinks import read_samples
from rlhf_cli.tracking.view.export import read_rollouts
from rlhf_cli.trainers.online.prompt_source import prompt_at
from rlhf_cli.trainers.online.state import LoopState

OLD = Path(__file__).parents[2] / "data" / "old_run"


def dynamic_run() -> Run:
    dynamic = DynamicSamplingConfig(dynamic_filtering=True, dynamic_oversample=1.0)
    run = Run(algorithm="rloo", dynamic=dynamic, episodes=8, staleness=1)
    run.engines.longest = 6
    return run


def remax_run() -> Run:
    return Run(algorithm="remax", episodes=8, staleness=1)


@pytest.mark.parametrize(("name", "make"), [("dynamic", dynamic_run), ("remax", remax_run)])
def test_a_run_is_resumed_from_surplus_and_batches_ahead_of_an_earlier_version(name, make):
    run, whole = make(), make()

    def prompt(place: int):
        return prompt_at(place, PROMPTS, run.settings)

    state = LoopState.of(
        json.loads((OLD / name / "state.json").read_text())["loop"],
        surplus=load_surplus(OLD / name, prompt),
        ahead=load_ahead(OLD / name, prompt),
    )
    assert (len(state.source.surplus), len(state.ahead)) == ((1, 1) if name == "dynamic" else (0, 1))
    run.engines.version = state.iteration
    run(state=state, total_iterations=5)
    whole(total_iterations=5)
    drop = state.iteration

    def numbers(logged):
        return [{k: v for k, v in metrics.items() if not k.startswith("perf/")} for _, metrics in logged]

    assert numbers(run.tracker.logged) == numbers(whole.tracker.logged[drop:])
    assert run.tracker.rows == whole.tracker.rows[drop:]


@pytest.mark.parametrize("name", ["training", "generate", "eval"])
def test_the_report_shows_samples_of_an_earlier_version(name):
    rows = read_rollouts(OLD / name / "samples.jsonl")["rows"]
    assert len(rows) == 4
    assert all(isinstance(row["response"], str) for row in rows)


def test_samples_of_an_earlier_version_are_selected():
    samples = read_samples(OLD / "generate" / "samples.jsonl")
    found = list(select_samples(samples, AnswersOutputConfig(select="best"), Counter()))
    assert found == [
        {"prompt": f"question {number}", "response": f"said {20 + number}", "score": score}
        for number, score in ((0, 0.5), (1, 1.5))
    ]
