"""State that leaves the accelerator and returns, under the real DeepSpeed; on a CPU only the logic."""

from types import SimpleNamespace

import pytest
import torch
from adapted_models import load
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from sleeping import assert_same, trained_weights
from tiny_training import OPTIM, load_policy, make_engine

from rlhf_cli.backends.training.deepspeed_config import check_compiler
from rlhf_cli.backends.training.sleep import HostCopies, TrainedStates
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.planning.architectures import find_shape
from rlhf_cli.planning.memory import WEIGHT_BYTES, RoleMemory

CPU = torch.device("cpu")


def test_frozen_tensors_have_one_copy_in_host_memory_that_is_not_written_again():
    weight = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
    copies = HostCopies([weight], pin=False)
    copies.leave()
    host = weight.data_ptr()
    copies.come_back(CPU)
    assert weight.data_ptr() != host
    weight.data[0] = 9.0  # the next lines show that the earlier copy is used
    copies.leave()
    assert (weight.data_ptr(), weight.tolist()) == (host, [0.0, 1.0, 2.0, 3.0])


def test_a_weight_that_moved_is_copied_again():
    weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    copies = HostCopies([weight], pin=False)
    for _ in range(2):
        copies.leave()
        copies.leave()  # a second call changes nothing
        copies.come_back(CPU)
        with torch.no_grad():
            weight.lerp_(torch.ones(2), 0.5)
    copies.leave()
    assert weight.tolist() == [0.75, 0.75]
    with torch.no_grad():
        weight.lerp_(torch.ones(2), 1.0)  # also while it is away
    copies.come_back(CPU)
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("stage", "dtype", "optimizer", "movable"),
    [
        (0, "fp32", "adamw", False),
        (0, "bf16", "adamw", False),
        (1, "fp32", "adamw", True),
        (1, "bf16", "adamw", False),
        (1, "bf16", "adamw_bf16", True),
        (2, "bf16", "adamw", True),
        (3, "bf16", "adamw", True),
    ],
)
def test_host_memory_is_counted_for_the_states_that_deepspeed_moves(tiny_model_dir, stage, dtype, optimizer, movable):
    _, module = load_policy(tiny_model_dir, stage, dtype=dtype)
    engine = make_engine(module, stage, dtype=dtype, optim=OPTIM.model_copy(update={"optim": optimizer}))
    assert TrainedStates(engine._engine, module, device=CPU).are_movable == movable
    role = RoleMemory(
        shape=find_shape("Qwen/Qwen2.5-0.5B"),
        num_trained=1,
        weight_bytes=WEIGHT_BYTES[dtype],
        settings=DeepSpeedConfig(zero_stage=stage),
        optimizer=optimizer,
    )
    assert role.moves_trained == movable


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_under_an_adapter_trains_on_after_it_slept(tiny_model_dir, stage):
    def sleep_and_wake(engine, module):
        states = TrainedStates(engine._engine, module, device=CPU)

        def once():
            states.leave(with_weights=False)
            states.leave(with_weights=True)
            states.come_back()

        return once

    never = trained_weights(tiny_model_dir, stage, lora_rank=2)
    assert_same(never, trained_weights(tiny_model_dir, stage, lora_rank=2, between=sleep_and_wake))


class FakeEngine:
    """The calls that move state; at stage 3 DeepSpeed's own need its fused Adam, which is not available on a CPU."""

    def __init__(self):
        self.optimizer = SimpleNamespace(offload_states=None)
        self.moved: list[list[OffloadStateTypeEnum]] = []

    def offload_states(self, include):
        self.moved.append(include)

    def reload_states(self):
        self.moved.append([])


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_frozen_shares_of_stage_3_are_moved_here_and_not_by_deepspeed(tiny_model_dir, lora_rank):
    module = PolicyModel(load(tiny_model_dir, 3, lora_rank=lora_rank, dtype="bf16"))
    # Adapters are partitioned later.
    shares = {name: getattr(p, "ds_tensor", p) for name, p in module.named_parameters()}
    before = {name: share.data_ptr() for name, share in shares.items()}
    engine = FakeEngine()
    states = TrainedStates(engine, module, device=CPU)
    states.leave(with_weights=True)
    moved = {name for name, share in shares.items() if share.data_ptr() != before[name]}
    states.come_back()
    assert moved == {name for name, p in module.named_parameters() if not p.requires_grad}
    # DeepSpeed maps the partitions of all weights into a buffer of the trained ones.
    assert (OffloadStateTypeEnum.lp_params in engine.moved[0]) == (lora_rank == 0)
    assert (len(engine.moved), engine.moved[1]) == (2, [])


def test_a_missing_compiler_is_named_with_the_ways_out():
    check_compiler("/usr/local/cuda", torch_cuda="13.0")
    with pytest.raises(UsageError, match=r"requires nvcc.*CUDA_HOME.*--zero_stage 2"):
        check_compiler(None, torch_cuda="13.0")


def test_a_toolkit_of_another_major_version_than_torchs_is_refused(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    check_compiler(str(tmp_path), torch_cuda="12.8")
    with pytest.raises(
        UsageError, match=r"version 12\.4, but torch was built for CUDA 13\.0; set CUDA_HOME to a matching"
    ):
        check_compiler(str(tmp_path), torch_cuda="13.0")
