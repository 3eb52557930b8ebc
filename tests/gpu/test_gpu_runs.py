"""Online runs whose models and engine share one NVIDIA GPU, killed at the worst moments.

test_ppo.py in e2e/ tests the same with CPU processes, where equal runs are equal bit for bit.
"""

import importlib.util

import pytest
import torch
from killed_runs import finish
from test_ppo import (
    ITERATIONS,
    assert_nothing_left,
    engine_process,
    kill_driver,
    plain_metrics,
    ppo_words,
    wait_for,
)
from test_ppo import rlhf as start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SLEEPS = ["--colocate_all_models", "--vllm_enable_sleep", "--deepspeed_enable_sleep"]
SHARED = [*SLEEPS, "--vllm_sync_backend", "ipc", "--vllm_gpu_memory_utilization", "0.4"]


def shared_words(command, model, problems, output) -> list[str]:
    """Return the arguments of a small run on one GPU."""
    words = [*ppo_words(model, problems, output, backend="vllm"), *SHARED]
    if command == "grpo":
        for name in ("--critic_learning_rate", "--kl_target"):
            place = words.index(name)
            del words[place : place + 2]
    return [command, *words[1:]]


def assert_engine_followed_the_actor(output) -> None:
    """Check that all iterations exist and that each was sampled with the actor's weights."""
    metrics = plain_metrics(output)
    assert list(metrics) == list(range(1, ITERATIONS + 1))
    for step in metrics.values():
        assert step["rollout_diff_max"] < 0.5
        assert step["rollout_prob_correlation"] > 0.99


@pytest.mark.parametrize("command", ["ppo", "grpo"])
def test_a_killed_run_on_a_shared_gpu_is_continued(command, tmp_path, model, problems):
    output = tmp_path / "killed"
    words = shared_words(command, model, problems, output)
    process = start(*words)
    try:
        wait_for(output / "checkpoints" / "step_000002" / "manifest.json", process)
        kill_driver(process)
    finally:
        process.kill()
    assert_nothing_left(output)
    finish(start(*words, "--load_checkpoint"))
    assert_engine_followed_the_actor(output)


def test_a_killed_engine_on_a_shared_gpu_is_started_again_with_the_present_weights(tmp_path, model, problems):
    output = tmp_path / "bereft"
    process = start(*shared_words("grpo", model, problems, output))
    try:
        wait_for(output / "checkpoints" / "step_000001" / "manifest.json", process)
        engine_process(output, "vllm").kill()
        finish(process)
    finally:
        process.kill()
    assert_engine_followed_the_actor(output)
    assert_nothing_left(output)
