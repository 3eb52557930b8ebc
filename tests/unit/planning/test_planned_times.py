"""Seconds of communication and of copies to host memory, worked out by hand for Qwen2.5-7B on H100 GPUs."""

from dataclasses import replace

import pytest
from plans import LARGE, SMALL, plan_of, plans_of

from rlhf_cli.planning.times import phase_times, step_seconds

N = 7_615_616_512
"""Parameters of Qwen2.5-7B."""
HOST = 0.7 * 55e9
"""Bytes per second between an H100 and its host."""


def seconds(command="sft", phase="train", **values):
    return plan_of(command, **values).times[phase].seconds


@pytest.mark.parametrize(
    ("zero_stage", "bytes_per_parameter"),
    [
        # All-reduce of float32 gradients, then updated bf16 weights.
        (2, 2 * 4 + 2),
        # bf16 weights for the forward and the backward pass, and reduce-scatter of float32 gradients.
        (3, 2 * 2 + 4),
    ],
)
def test_a_slow_network_moves_gradients_and_weights(zero_stage, bytes_per_parameter):
    """16 ranks on two nodes, one micro-batch each, 0.1 GB/s: all other times are about a second."""
    sizes = {"num_gpus": 8, "num_nodes": 2, "train_batch_size": 128, "train_max_tokens_per_gpu": 8192}
    found = seconds(zero_stage=zero_stage, network=0.1, **sizes)
    assert found == pytest.approx(bytes_per_parameter * N / (0.7 * 0.1e9 * 16 / 15), rel=0.01)


def test_offloaded_weights_are_copied_for_each_micro_batch():
    short = {"num_gpus": 8, "train_batch_size": 8, "row_tokens": 8}
    copied = seconds("dpo", "forward", ref_offload="true", **short) - seconds("dpo", "forward", **short)
    assert copied == pytest.approx(2 * N / HOST, rel=0.01)


def test_offloaded_activations_are_copied_twice():
    """The inputs of 28 layers with 3,584 values in bf16, for 128 rows of 1,024 tokens."""
    given = {"lora_rank": 8, "gradient_checkpointing": "true", "train_max_tokens_per_gpu": 8192}
    copied = seconds(activation_offload="true", **given) - seconds(**given)
    assert copied == pytest.approx(2 * 128 * 1024 * 28 * 3584 * 2 / HOST)
    # On a CPU, they would stay in the same memory.
    on_cpu = [plan_of("sft", gpu="cpu", activation_offload=one, **given).peak for one in ("true", "false")]
    assert on_cpu[0] == on_cpu[1]


def test_small_updates_launch_as_many_kernels_as_large_ones():
    plan = plan_of("sft", pretrain="Qwen/Qwen2.5-1.5B", row_tokens=8, train_batch_size=8)
    eight = replace(plan.work, tokens=replace(plan.work.tokens, updates=8))
    assert phase_times(eight, plan.batching)["train"].seconds == pytest.approx(8 * plan.seconds, rel=0.05)


def test_a_judge_model_answers_the_questions_of_its_method():
    """16 prompts with 8 responses, on engines that take turns with the rollout engines."""
    methods = {"pointwise": 128, "rubric": 128, "pairwise": 128 * 7, "listwise": 2 * 16}
    given = {"judge": SMALL, "n_samples_per_prompt": 8, "rollout_batch_size": 16, "colocate_all_models": "true"}
    plans = {method: plan_of("grpo", num_gpus=8, judge_method=method, **given) for method in methods}
    assert {method: plan.work.questions.requests for method, plan in plans.items()} == methods
    tokens, asked = plans["pairwise"].work.tokens, plans["pairwise"].work.questions
    assert asked.prompt == 200 + tokens.prompt + 2 * tokens.response
    times = {method: plan.times["reward"].seconds for method, plan in plans.items()}
    assert times["pointwise"] == times["rubric"] < times["pairwise"]
    # Twice the parameters of a token for each one that is read or sampled, on eight GPUs.
    judge = plans["pairwise"].work.judge
    assert judge is not None
    operations = 2 * judge.shape.active * asked.requests * (asked.prompt + asked.response) / 8
    assert operations / (0.75 * 989e12) < times["pairwise"]
    assert plans["pairwise"].seconds == pytest.approx(sum(time.seconds for time in plans["pairwise"].times.values()))


def test_more_judge_engines_are_proposed_where_sampling_is_short():
    _, changes = plans_of("eval", num_gpus=8, judge=LARGE, pretrain=SMALL)
    assert changes[0].flags == "--judge_num_engines 4"


def test_a_judge_on_separate_gpus_reads_responses_while_others_are_sampled():
    given = {"num_gpus": 8, "n_samples_per_prompt": 8, "judge": LARGE, "judge_num_engines": 4}
    fast = plan_of("grpo", max_new_tokens=4096, max_len=5120, **given | {"judge": "Qwen/Qwen2.5-0.5B"})
    assert "reward" not in fast.times
    slow = plan_of("grpo", judge_method="pairwise", **given)
    waiting = plan_of("grpo", judge_method="pairwise", **given | {"judge_num_engines": None})
    assert slow.times["reward"].seconds < 2 * waiting.times["reward"].seconds
    # Sampling waits for verdicts too, so training hides both.
    ahead = replace(slow.work, samples_ahead=True)
    sampling = slow.times["generate"].seconds + slow.times["reward"].seconds
    training = slow.times["forward"].seconds + slow.times["train"].seconds
    assert step_seconds(ahead, slow.times) == max(sampling, training) + slow.times["transfer"].seconds
