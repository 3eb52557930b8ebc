"""The rows of samples.jsonl: their numbers worked out by hand, their ids, their keys."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from online_fakes import EXACT, PROMPTS, WITH_REFERENCE, Run
from samples import sample_of

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.rollouts import Branch, Episode, Generation
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.sample_rows import LEARNED, sample_row

DOCS = Path(__file__).parents[3] / "docs" / "run-directory.md"


def rows_of(run: Run) -> list[dict[str, Any]]:
    return [row for _, rows in run.tracker.rows for row in rows]


def test_log_probs_ratio_and_divergence_are_those_of_the_sampled_tokens():
    """Per token the engine gives -0.5, the policy -1.0 and the reference -1.25: k1 of 0.25."""
    run = Run(policy=WITH_REFERENCE)
    run(total_iterations=1)
    rows = rows_of(run)
    assert {row["length"] for row in rows} > {3}
    for row in rows:
        length = row["length"]
        assert (row["rollout_logprob"], row["old_logprob"], row["ref_logprob"]) == (
            -0.5 * length,
            -1.0 * length,
            -1.25 * length,
        )
        assert row["ratio"] == pytest.approx(math.exp(-0.5), abs=1e-6)
        assert row["kl"] == 0.25 * length
    trained = [sample.columns["advantages"] for sample in run.actor.updates[0][0]]
    assert [row["advantage"] for row in rows] == pytest.approx([column.mean() for column in trained], abs=1e-6)


def test_log_probs_that_the_update_did_not_need_are_null():
    run = Run()
    run(total_iterations=1)
    for row in rows_of(run):
        assert [row[name] for name in LEARNED[:4]] == [None] * 4
        assert row["advantage"] is not None


def test_a_response_that_is_not_trained_on_has_no_advantage():
    masked = Run(policy=ActorCriticPolicyConfig(init_kl_coef=0.0, mask_truncated=True), fails=lambda index: index == 1)
    masked(total_iterations=3)
    truncated = [row for row in rows_of(masked) if row["finish_reason"] == "length"]
    failed = [row for row in rows_of(masked) if row["verdict"] == "failed"]
    assert truncated
    assert failed
    assert {row["advantage"] for row in truncated + failed} == {None}


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_id_is_unique_and_leads_to_its_row_and_its_weights(staleness):
    def even(request: ScoreRequest) -> Score:
        is_right = sum(map(int, request.response)) % 2 == 0
        return Score(float(is_right), "correct" if is_right else "wrong")

    dynamic = DynamicSamplingConfig(dynamic_filtering=True, dynamic_oversample=1.0)
    run = Run(algorithm="rloo", dynamic=dynamic, episodes=8, staleness=staleness)
    run.scorer.judge = even  # type: ignore[method-assign]
    run(total_iterations=6, save_steps=1)
    assert any(state.source.surplus for state in run.saved)
    rows = rows_of(run)
    assert len({row["id"] for row in rows}) == len(rows)
    for step, step_rows in run.tracker.rows:
        for row in step_rows:
            assert row["id"] == f"data.jsonl:{row['row']}/{row['group']}.{row['sample']}@{row['weight_version']}"
            assert PROMPTS[row["row"]].text == row["prompt"]
            assert 0 <= row["weight_version"] <= step - 1
    first = [row["weight_version"] for row in run.tracker.rows[0][1]]
    assert set(first) == {0}
    if not staleness:
        assert max(row["weight_version"] for row in run.tracker.rows[3][1]) == 3


def test_the_keys_of_all_rows_are_in_the_table_of_the_run_directory():
    section = DOCS.read_text().split("\n## Samples\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    documented = {key for line in lines for key in re.findall(r"`([^`]+)`", line.split("|")[1])}
    run = Run(policy=WITH_REFERENCE, reward=EXACT, distill_coef=0.5)
    run(total_iterations=1)
    earlier = Branch([1], [2], ((0, 1),), ({"role": "user", "content": "p"},))
    episode = Episode(((0, 1),), (1.0,), opening="Begin.", cut="ended it at a limit", earlier=(earlier,))
    response = Generation([1, 2], [-0.5, -0.5], "stop", 1, episode, version_runs=((1, 1), (2, 1)))
    score = Score(1.0, "correct", parts={"exact": 1.0}, metrics={"exact/seconds": 0.1}, judgements=[{"reason": "r"}])
    keys = {"step", *sample_row(sample_of(PROMPTS[0], response, score))} | set(rows_of(run)[0])
    assert {key for key in keys if "/" not in key} <= documented
    patterns = {"reward/NAME", "ROLE_logprob", "ROLE_kl"}
    assert documented - keys == patterns | {"pretrain", "tools", "data_source", "images", "step_scores"}
