"""Sleep frees GPU memory, and the state is restored exactly. Run with `pytest -m gpu`."""

import pytest
import torch
from adapted_models import load
from sleeping import assert_same, trained_weights

from rlhf_cli.backends.training.frozen_model import FrozenEngine
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.policy import PolicyModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("group_of_one"),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_sleep_frees_memory_and_leaves_no_trace(tiny_model_dir, stage, lora_rank):
    memory = []

    def sleep_and_wake(engine, module):
        def once():
            awake = torch.cuda.memory_allocated()
            engine.sleep()
            asleep = torch.cuda.memory_allocated()
            engine.wake()
            memory.append((awake, asleep, torch.cuda.memory_allocated()))

        return once

    never = trained_weights(tiny_model_dir, stage, lora_rank=lora_rank, sleeps=True)
    slept = trained_weights(tiny_model_dir, stage, lora_rank=lora_rank, sleeps=True, between=sleep_and_wake)
    assert_same(never, slept)
    if lora_rank or stage >= 2:
        assert all(asleep < awake for awake, asleep, _ in memory)
    assert all(asleep <= again for _, asleep, again in memory)
    assert memory[2][2] <= memory[1][2] + 2**20, "memory grows with every sleep"


def test_a_frozen_model_leaves_the_gpu_and_comes_back(tiny_model_dir):
    module = PolicyModel(load(tiny_model_dir, lora_rank=0, dtype="bf16"))
    engine = FrozenEngine(module, DeepSpeedConfig(zero_stage=0), param_dtype="bf16")
    before = {name: weight.cpu() for name, weight in module.named_parameters()}
    for _ in range(2):
        engine.sleep()
        assert all(weight.device.type == "cpu" and weight.is_pinned() for weight in module.parameters())
        engine.wake()
    assert all(torch.equal(weight.cpu(), before[name]) for name, weight in module.named_parameters())
