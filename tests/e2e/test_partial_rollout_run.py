"""End-to-end test of `rlhf grpo --async_train --partial_rollout`, killed and resumed."""

import importlib.util
import json
import time
from collections import Counter
from pathlib import Path

import pytest
from forked import run_rlhf, started_rlhf
from killed_runs import plain_metrics
from site_hooks import undocumented
from test_ppo import assert_nothing_left

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ITERATIONS, PROMPTS, SAMPLES = 5, 8, 2


def test_weights_change_in_the_middle_of_responses_and_no_prompt_is_lost_or_trained_twice(tmp_path: Path):
    problems, model, output = tmp_path / "problems.jsonl", tmp_path / "tiny", tmp_path / "run"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 18) for b in range(10, 18)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2 --vocab_size 300"
    run_rlhf("scratch", "--dataset", problems, *size.split(), "--output", model)
    words = (
        f"grpo --pretrain {model} --prompt_data {problems} --label_key answer --reward_funcs exact --max_len 600 "
        f"--max_new_tokens 500 --rollout_batch_size {PROMPTS} --n_samples_per_prompt {SAMPLES} --train_batch_size 4 "
        f"--max_iterations {ITERATIONS} --init_kl_coef 0 --actor_learning_rate 1e-3 --save_steps 1 --param_dtype fp32 "
        f"--enforce_eager --async_train --partial_rollout --max_staleness 2 --output {output}"
    ).split()
    with started_rlhf(*words) as command:  # killed at the end
        while not (output / "checkpoints" / "step_000002" / "manifest.json").exists():
            assert command.is_running(), command.printed()
            time.sleep(0.05)
    assert_nothing_left(output)
    said = run_rlhf(*words, "--load_checkpoint")
    assert f"{ITERATIONS}/{ITERATIONS} iterations" in said

    metrics = plain_metrics(output)
    assert sorted(metrics) == list(range(1, ITERATIONS + 1))
    assert max(found["staleness/max"] for found in metrics.values()) <= 2
    assert any(found.get("staleness/mixed", 0.0) > 0 for found in metrics.values())
    current = [found["rollout_k3_current"] for found in metrics.values() if "rollout_k3_current" in found]
    assert current
    assert max(current) < 1e-6
    assert not undocumented("grpo", metrics[ITERATIONS])
    samples = [json.loads(line) for line in (output / "samples.jsonl").open()]
    assert len(samples) == ITERATIONS * PROMPTS * SAMPLES
    assert set(Counter(row["prompt"] for row in samples).values()) == {SAMPLES}
