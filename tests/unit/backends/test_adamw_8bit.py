"""AdamW with 8-bit moments, with the real bitsandbytes if it is installed; otherwise only the error."""

from typing import Any

import pytest
import torch
from tiny_training import OPTIM, Items, Layout, load_policy, make_engine, make_sequences, train, weights_of
from torch import nn
from transformers.utils import is_bitsandbytes_available

from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.backends.training.optimizers import leave_out_if_not_finite
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError

IN_8_BITS = OPTIM.model_copy(update={"optim": "adamw_8bit"})
STEPS = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]
needs_package = pytest.mark.skipif(not is_bitsandbytes_available(), reason="bitsandbytes is not installed")


@pytest.mark.skipif(is_bitsandbytes_available(), reason="bitsandbytes is installed")
def test_a_missing_package_is_refused_with_the_command_that_installs_it():
    with pytest.raises(UsageError, match=r"bitsandbytes is not installed: pip install 'rlhf-cli\[quant\]'"):
        check_deepspeed(DeepSpeedConfig(), param_dtype="bf16", optimizer="adamw_8bit")


def test_a_step_that_is_not_finite_finds_no_gradients():
    weight = nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.RMSprop([weight], lr=0.1, alpha=0.99)
    optimizer.register_step_pre_hook(leave_out_if_not_finite)
    weight.grad, optimizer.found_inf = torch.ones(2), torch.ones(())
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    weight.grad, optimizer.found_inf = torch.ones(2), None
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)  # 0.1 / sqrt(0.01)


@needs_package
@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_learns_as_float32_moments_do_and_goes_on_bit_for_bit(tiny_model_dir, tmp_path, stage, dtype):
    items, losses = Items(make_sequences(12)), []
    for optim in (OPTIM, IN_8_BITS):
        hf_model, module = load_policy(tiny_model_dir, stage, dtype=dtype)
        engine = make_engine(module, stage, dtype=dtype, optim=optim, learning_rate=1e-2)
        losses.append([step["loss"] for step in train(engine, items, [STEPS[0]] * 5, Layout())])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    engine.save(tmp_path)
    expected = train(engine, items, STEPS, Layout())
    other_model, other = load_policy(tiny_model_dir, stage, dtype=dtype)
    resumed = make_engine(other, stage, dtype=dtype, optim=IN_8_BITS, learning_rate=1e-2)
    resumed.load(tmp_path)
    assert train(resumed, items, STEPS, Layout()) == expected
    weights, same = weights_of(engine, hf_model), weights_of(resumed, other_model)
    assert all(weight.equal(same[name]) for name, weight in weights.items())


@needs_package
@pytest.mark.usefixtures("group_of_one")
def test_moments_of_large_tensors_take_a_byte_a_parameter(tiny_model_dir):
    _, module = load_policy(tiny_model_dir, 2, dtype="bf16")
    engine = make_engine(module, 2, dtype="bf16", optim=IN_8_BITS)
    train(engine, Items(make_sequences(3)), [[0, 1, 2]], Layout())
    states = [s for s in engine._engine.basic_optimizer.state.values() if s["state1"].numel() >= 4096]
    assert states
    assert {state[name].dtype for state in states for name in ("state1", "state2")} == {torch.uint8}
