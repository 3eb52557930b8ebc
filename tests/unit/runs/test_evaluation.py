"""Metrics of an evaluation, the results table, and the settings of `rlhf eval`."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PretrainedConfig

from rlhf_cli.algorithms.answer_statistics import wilson_interval
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.preparing import DataReport
from rlhf_cli.data.prompts import Prompt, PromptData
from rlhf_cli.data.reading.sources import Row, Source
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.options import build_config
from rlhf_cli.rewards.evaluation import Answer, by_source, evaluate_answers, pass_rate
from rlhf_cli.rewards.records import Score, Status
from rlhf_cli.runs.inference.evaluate import EvalRun, results_of, rows_with_pass_rate
from rlhf_cli.runs.inference.model import InferenceModel
from rlhf_cli.runs.inference.output_folder import Chunks
from rlhf_cli.runs.inference.run import ModelUnderTest
from rlhf_cli.tracking.terminal.evaluation_table import EvaluatedModel, evaluation_table, print_table

NEEDED = {"pretrain": "a", "prompt_data": "p", "reward_funcs": "gsm8k"}


def answer(status: Status, key: str | None = None, *, length: int = 10, truncated: bool = False) -> Answer:
    value = {"correct": 1.0, "failed": None}.get(status, 0.0)
    return Answer(Score(value, status, answer=key), length, truncated)


RIGHT, WRONG, SILENT, FAILED = answer("correct", "7"), answer("wrong", "8"), answer("invalid"), answer("failed")


def test_each_prompt_counts_once_however_many_of_its_samples_were_judged():
    found = evaluate_answers([[RIGHT, RIGHT, WRONG, WRONG], [RIGHT, FAILED, FAILED, FAILED]])
    assert found.figures["accuracy"].value == pytest.approx((0.5 + 1.0) / 2)
    assert found.figures["reward"].value == pytest.approx(0.75)


def test_metrics_of_quality_come_with_the_ends_of_their_intervals():
    metrics = evaluate_answers([[RIGHT], [WRONG]]).metrics
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == wilson_interval(0.5, 2)
    assert {name for name in metrics if name.endswith("_low")} == {"accuracy_low", "reward_low"}
    assert evaluate_answers([[answer("scored")]]).metrics.keys().isdisjoint({"reward_low", "reward_high"})


def test_failed_rewards_are_counted_apart_and_never_as_zero():
    found = evaluate_answers([[RIGHT, FAILED], [FAILED, FAILED], [WRONG, RIGHT]], ks=[1, 2])
    assert found.figures["accuracy"].value == pytest.approx(0.75)  # two prompts: 1 and 0.5
    assert found.figures["accuracy"].num_prompts == 2
    assert found.figures["pass@1"].value == pytest.approx(0.75)
    assert (found.figures["pass@2"].value, found.figures["pass@2"].num_prompts) == (1.0, 1)  # of one prompt
    assert (found.counts["num_failed"], found.counts["reward_failed"]) == (3.0, 0.5)
    assert (found.counts["num_prompts"], found.counts["num_responses"]) == (3.0, 6.0)


def test_lengths_and_cut_responses_are_of_all_samples():
    samples = [answer("correct", length=4), answer("failed", length=8, truncated=True)]
    found = evaluate_answers([samples, [answer("wrong", length=30)]])
    assert found.figures["response_length"].value == pytest.approx((6 + 30) / 2)
    assert found.figures["truncated"].value == pytest.approx(0.25)
    assert found.counts["response_length_max"] == 30


def test_a_single_answer_to_each_prompt_has_wilsons_interval():
    found = evaluate_answers([[RIGHT]] * 3 + [[WRONG]])
    assert found.figures["accuracy"].interval == pytest.approx(wilson_interval(0.75, 4))
    assert set(found.figures) == {"accuracy", "invalid", "reward", "truncated", "response_length"}


def test_a_majority_is_taken_over_answers_and_silence_has_no_vote():
    found = evaluate_answers([[RIGHT, SILENT, SILENT, WRONG]], ks=[4])
    assert found.figures["maj@4"].value == pytest.approx(0.5)
    assert found.figures["pass@4"].value == 1.0
    assert found.figures["invalid"].value == 0.5


def test_scores_without_a_verdict_are_right_from_the_pass_score_on():
    samples = [[Answer(Score(value, "scored"), 5, False) for value in (0.2, 0.6, 0.9)]]
    assert "accuracy" not in evaluate_answers(samples, ks=[1]).figures
    found = evaluate_answers(samples, ks=[2], pass_score=0.6)
    assert found.figures["accuracy"].value == pytest.approx(2 / 3)
    assert found.figures["pass@2"].value == 1.0
    assert "maj@2" not in found.figures  # no answer was found
    assert pass_rate(samples[0], pass_score=0.6) == pytest.approx(2 / 3)


def test_a_pass_rate_is_of_the_judged_samples():
    assert pass_rate([RIGHT, WRONG, FAILED, SILENT]) == pytest.approx(1 / 3)
    assert pass_rate([FAILED]) is None


def test_where_every_reward_failed_nothing_is_claimed():
    found = evaluate_answers([[FAILED, FAILED]], ks=[2])
    assert set(found.figures) == {"truncated", "response_length"}
    assert found.counts["reward_failed"] == 1.0


def test_several_data_sets_come_apart_and_together():
    found = by_source([("a", [RIGHT]), ("b", [WRONG]), ("a", [WRONG])])
    assert {name: len(samples) for name, samples in found.items()} == {"all": 3, "a": 2, "b": 1}
    assert list(by_source([("a", [RIGHT])])) == ["a"]


def table(results: list[EvaluatedModel]) -> str:
    console = Console(file=StringIO(), width=80)  # not a terminal: lines are not wrapped
    print_table(console, evaluation_table(results))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_a_row_for_each_model_and_data_set_and_no_column_twice():
    prompts = [("data/gsm8k.jsonl", [RIGHT, WRONG])] * 5 + [("aime.json", [WRONG, SILENT])] * 3
    results = [
        EvaluatedModel(model, source, 2, evaluate_answers(samples, ks=[1, 2]))
        for model in ("runs/a", "runs/b")
        for source, samples in by_source(prompts).items()
    ]
    lines = table(results).splitlines()
    assert lines[0].split() == [
        "model",
        "data",
        "prompts",
        "avg@2",
        "pass@2",
        "maj@2",
        "tokens",
        "truncated",
        "no",
        "answer",
    ]
    assert [line.split()[:4] for line in lines if line.startswith("runs")] == [
        [model, *row]
        for model in ("runs/a", "runs/b")
        for row in (["all", "8", "31.2%"], ["gsm8k.jsonl", "5", "50.0%"], ["aime.json", "3", "0.0%"])
    ]
    assert "failed" in table([EvaluatedModel("a", "b", 2, evaluate_answers([[RIGHT, FAILED]]))])


def test_figures_are_kept_with_their_intervals():
    written = EvaluatedModel("a", "b", 1, evaluate_answers([[RIGHT], [WRONG]])).as_json()
    low, high = wilson_interval(0.5, 2)
    assert written["figures"]["accuracy"] == {"value": 0.5, "low": low, "high": high, "num_prompts": 2}
    assert json.loads(json.dumps(written)) == written


def config(**settings: Any) -> EvalConfig:
    return build_config(EvalConfig, NEEDED | settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"n_samples_per_prompt": 4}, "temperature 0 generates the same response each time"),
        ({"k": "8", "n_samples_per_prompt": 4, "temperature": 1}, "k 8 exceeds n_samples_per_prompt 4"),
        ({"k": "0,1"}, "k must be at least 1, not 0"),
        ({"reward_funcs": ""}, "no reward: set --reward_funcs"),
        ({"reward_funcs": "", "reward_func": "r.py", "k": "1"}, "k counts correct responses: set a verifier in"),
        ({"reward_funcs": "format", "k": "1"}, "k counts correct responses: set a verifier in"),
        ({"reward_funcs": "", "reward_func": "r.py", "write_pass_rate": "r"}, "write_pass_rate counts correct"),
        ({"pretrain": "a,b", "write_pass_rate": "rates"}, "write_pass_rate supports one model"),
        ({"pretrain": "a, a"}, "lists a model twice"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, complaint):
    with pytest.raises(UsageError, match=complaint):
        config(**settings)


def test_answers_are_greedy_unless_samples_are_asked_for():
    assert (config().sampling.temperature, config().ks) == (0.0, [])
    assert config(n_samples_per_prompt=4, temperature=0.6).ks == [4]
    assert config(n_samples_per_prompt=4, temperature=0.6, k="4,1").ks == [1, 4]
    assert config(pretrain="a, b/c").model.names == ["a", "b/c"]


PROMPTS = [Prompt([i], f"<{i}>", str(i), "data.jsonl", 10 + i) for i in range(3)]
DATA = PromptData(
    PROMPTS,
    DataReport("prompts"),
    "",
    row_of=lambda prompt: Row({"question": prompt.label, "id": prompt.index}, Source(prompt.source, ()), prompt.index),
    conversation_of=lambda prompt: Conversation((Message("user", prompt.text),)),
    where=str,
)


def run(rows: int | None, *names: str, size: int = 2) -> EvalRun:
    settings = config(pretrain=",".join(names), n_samples_per_prompt=2, temperature=1.0)
    chunks = Chunks(len(PROMPTS), size, 2)
    asked = [
        ModelUnderTest(
            settings,
            "transformers",
            InferenceModel(settings.model, FoundModel("m", PretrainedConfig()), None),
            DATA,
            None,
            chunks,
            1 + 2 * i,
        )
        for i in range(len(names))
    ]
    return EvalRun(settings, asked, {}, rows)


@pytest.mark.parametrize(
    ("rows", "begins"),
    [(None, [0, 0]), (3, [0, 0]), (5, [1, 0]), (6, [2, 0]), (9, [2, 0]), (10, [2, 1]), (12, [2, 2])],
)  # two models with chunks of 4 and 2 responses each
def test_an_evaluation_goes_on_in_the_model_and_chunk_where_it_ended(rows, begins):
    assert run(rows, "a", "b").begins == begins
    assert run(rows, "a", "b").is_answered == (rows == 12)


def written_rows(root: Path, *names: str, earlier: bool = False) -> None:
    verdicts = [("correct", "correct"), ("wrong", "correct"), ("failed", "failed")]
    rows: list[dict[str, Any]] = [
        {
            "step": 1,
            "pretrain": name,
            "prompt_index" if earlier else "group": index,
            "source": "data.jsonl",
            "score" if earlier else "reward": {"correct": 1.0, "wrong": 0.0}.get(verdict),
            **({"scores": {}} if earlier else {}),
            "verdict": verdict,
            "detail": "",
            "answer": None,
            "num_tokens" if earlier else "length": 3,
            "finish_reason": "stop",
        }
        for name in names
        for index, pair in enumerate(verdicts)
        for verdict in pair
    ]
    (root / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("earlier", [False, True])
def test_figures_are_of_each_model_and_read_from_the_responses_that_were_kept(tmp_path, earlier):
    written_rows(tmp_path, "a", "b", earlier=earlier)
    results = results_of(run(12, "a", "b"), tmp_path)
    assert [result.pretrain for result in results] == ["a", "b"]
    assert [result.evaluation.figures["accuracy"].value for result in results] == [0.75, 0.75]
    assert results[0].evaluation.counts["num_failed"] == 2


def test_rows_keep_their_columns_beside_the_pass_rate_and_unknown_ones_are_null(tmp_path):
    written_rows(tmp_path, "a")
    rows = list(rows_with_pass_rate(run(6, "a"), tmp_path))
    assert rows == [
        {"question": "0", "id": 10, "pass_rate": 1.0},
        {"question": "1", "id": 11, "pass_rate": 0.5},
        {"question": "2", "id": 12, "pass_rate": None},
    ]


def test_figures_are_apart_for_the_sources_that_rows_name(tmp_path):
    written_rows(tmp_path, "a")
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    rows = [row | {"data_source": ["gsm8k", "math", "math"][row["group"]]} for row in rows]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = {result.source: result.evaluation.figures for result in results_of(run(6, "a"), tmp_path)}
    assert list(figures) == ["all", "gsm8k", "math"]
    assert [figures[name]["accuracy"].value for name in figures] == [0.75, 1.0, 0.5]


def stepped(is_right: bool, *steps: float) -> Answer:
    return replace(RIGHT if is_right else WRONG, steps=steps)


CHOICE = [stepped(True, 0.9, 0.6), stepped(False, 0.5, 0.95), stepped(False, 0.7, 0.7)]
"""Minimum: 0.6, 0.5, 0.7; product: 0.54, 0.475, 0.49; last step: 0.6, 0.95, 0.7."""


def test_a_process_reward_model_chooses_the_sample_with_the_best_steps():
    found = evaluate_answers([CHOICE], ks=[1, 2, 3], aggregations=["min", "prod", "last", "mean"]).figures
    chosen = {name: figure.value for name, figure in found.items() if name.startswith("prm_")}
    assert chosen == pytest.approx(
        {
            "prm_min@2": 1 / 3,  # right only against the second
            "prm_min@3": 0.0,
            "prm_prod@2": 2 / 3,  # right in each of its pairs
            "prm_prod@3": 1.0,
            "prm_last@2": 0.0,
            "prm_last@3": 0.0,
            "prm_mean@2": 2 / 3,  # 0.75, 0.725, 0.7
            "prm_mean@3": 1.0,
        }
    )


def test_a_choice_is_among_judged_samples_and_over_prompts_that_have_enough():
    found = evaluate_answers(
        [CHOICE, [stepped(True, 0.1), replace(FAILED, steps=(0.9,))]], ks=[2], aggregations=["min"]
    )
    assert (found.figures["prm_min@2"].value, found.figures["prm_min@2"].num_prompts) == (pytest.approx(1 / 3), 1)
    assert not any(name.startswith("prm_") for name in evaluate_answers([[RIGHT, WRONG]], ks=[2]).figures)


def test_the_steps_of_kept_responses_are_read_back(tmp_path):
    written_rows(tmp_path, "a")
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["step_scores"] = [0.5, number / 10]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (result,) = results_of(run(6, "a"), tmp_path)
    # The second prompt has a wrong sample with 0.2 and a right one with 0.3.
    assert result.evaluation.figures["prm_min@2"].value == 1.0


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"prm_pretrain": "m"}, "selects among the samples for a prompt: set --n_samples_per_prompt above 1"),
        (
            {"prm_pretrain": "m", "prm_aggregation": "min,min"},
            "prm_aggregation min,min must list some of .*, each once",
        ),
        ({"prm_pretrain": "m", "prm_aggregation": "max"}, "prm_aggregation max must list some of"),
        ({"prm_pretrain": "m", "reward_funcs": "format"}, "prm_pretrain counts correct responses: set a verifier"),
    ],
)
def test_settings_of_a_process_reward_model_that_contradict_others_are_refused(settings, complaint):
    with pytest.raises(UsageError, match=complaint):
        config(**settings)
