"""The settings passed to DeepSpeed, and that DeepSpeed reads them as intended."""

from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from rlhf_cli.backends.training.deepspeed_config import deepspeed_config
from rlhf_cli.config.train import DeepSpeedConfig


def zero_of(*, num_gpus: int, **settings: Any) -> DeepSpeedZeroConfig:
    config = deepspeed_config(DeepSpeedConfig(**settings), param_dtype="bf16", max_norm=1.0, num_gpus=num_gpus)
    return DeepSpeedZeroConfig(**config["zero_optimization"])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("num_gpus", "overlaps"), [(0, False), (1, False), (2, True), (8, True)])
def test_communication_overlaps_by_default_between_several_gpus_alone(stage, num_gpus, overlaps):
    assert zero_of(zero_stage=stage, num_gpus=num_gpus).overlap_comm is overlaps


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_given_overlap_is_kept(given, num_gpus):
    assert zero_of(overlap_comm=given, num_gpus=num_gpus).overlap_comm is given


def test_nothing_overlaps_by_default_beside_an_optimizer_in_host_memory():
    assert zero_of(adam_offload=True, num_gpus=8).overlap_comm is False
    assert zero_of(adam_offload=True, num_gpus=8, overlap_comm=True).overlap_comm is True


def test_two_buckets_that_overlap_take_less_memory_than_the_one_of_before():
    before, with_overlap = (zero_of(num_gpus=number).reduce_bucket_size for number in (1, 2))
    assert 2 * with_overlap < before


def test_gradients_in_host_memory_are_reduced_in_buckets_of_less_than_a_small_model():
    assert zero_of(num_gpus=0).reduce_bucket_size == zero_of(num_gpus=0, overlap_comm=True).reduce_bucket_size
    assert 4 * zero_of(num_gpus=0).reduce_bucket_size < 100 << 20
