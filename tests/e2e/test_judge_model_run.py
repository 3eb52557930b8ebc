"""End-to-end test of a judge model in vLLM that `rlhf grpo` starts: killed, resumed, and explained.

An untrained model cannot judge, so its verdicts are sampled; the schema of the verdict makes each of them valid.
"""

import importlib.util
import json
import time
from pathlib import Path

import pytest
from forked import run_rlhf, started_rlhf
from killed_runs import assert_same_run
from test_ppo import assert_nothing_left

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_a_killed_run_with_a_judge_model_ends_like_an_uninterrupted_one(model: Path, problems: Path, tmp_path: Path):
    rubric = [{"criterion": "States the sum.", "weight": 3}, {"criterion": "Is rude.", "weight": -1}]
    rows = [json.loads(line) | {"rubric": rubric} for line in problems.open()]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def words(output: str) -> list[str]:
        text = (
            f"grpo --pretrain {model} --prompt_data {data} --label_key answer --max_len 64 --max_new_tokens 4 "
            f"--rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 --max_iterations 3 --save_steps 1 "
            f"--init_kl_coef 0 --actor_learning_rate 1e-3 --rollout_backend transformers --judge_method rubric "
            f"--judge {model} --output {tmp_path / output} --judge_args"
        )
        return [*text.split(), '{"temperature": 1.0}']

    assert "judge" in run_rlhf(*words("whole"))
    with started_rlhf(*words("killed")) as command:  # killed at the end
        while not (tmp_path / "killed" / "checkpoints" / "step_000001" / "manifest.json").exists():
            assert command.is_running(), command.printed()
            time.sleep(0.05)
    assert_nothing_left(tmp_path / "killed")
    run_rlhf(*words("killed"), "--load_checkpoint")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")

    samples = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").open()]
    assert len(samples) == 3 * 4 * 2
    for row in samples:
        met = [judgement["met"] for judgement in row["judgements"]]
        assert [judgement["criterion"] for judgement in row["judgements"]] == ["States the sum.", "Is rude."]
        assert row["reward/judge"] == (3 * met[0] - met[1]) / 3
    assert len({row["reward"] for row in samples}) > 1
    assert (tmp_path / "whole" / "logs" / "judge-0.log").exists()
    trained = next(row for row in reversed(samples) if row["advantage"])
    said = run_rlhf("why", tmp_path / "whole", "--sample", trained["id"])
    assert "States the sum." in said
    assert "Equal to the run" in said
