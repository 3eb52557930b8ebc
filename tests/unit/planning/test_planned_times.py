"""Seconds of communication and of copies to host memory, worked out by hand for Qwen2.5-7B on H100 GPUs."""

from dataclasses import replace

import pytest
from plans import plan_of

from rlhf_cli.planning.times import phase_times

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
