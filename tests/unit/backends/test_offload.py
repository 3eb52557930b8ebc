"""Weights and activations in host memory: equal results, and where the tensors are stored."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from online_settings import resolve
from tiny_training import Items, Layout, load_policy, make_engine, make_sequences, train, weights_of

from rlhf_cli.backends.training.deepspeed_config import check_deepspeed, check_secondary_parts, deepspeed_config
from rlhf_cli.backends.training.frozen_model import FrozenEngine
from rlhf_cli.backends.training.frozen_teacher import FrozenTeacher
from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.roles import ROLES
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import keep_saved_tensors
from rlhf_cli.options import build_config
from rlhf_cli.runs.offline.distill import teacher_deepspeed

pytestmark = pytest.mark.usefixtures("group_of_one")
STEPS = [[0, 1, 2, 3], [4, 5]]


def trained(path: str, stage: int, *, zero: dict[str, Any], **model: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    hf_model, module = load_policy(path, stage, **model)
    engine = make_engine(module, stage, **zero)
    metrics = train(engine, Items(make_sequences(6)), STEPS, Layout(max_tokens=30))
    return metrics, weights_of(engine, hf_model)


def test_partitioned_weights_in_host_memory_take_the_same_steps(tiny_model_dir):
    (plain, weights), (offloaded, same) = (
        trained(tiny_model_dir, 3, zero={"param_offload": offload}) for offload in (False, True)
    )
    assert plain == offloaded
    assert all(weight.equal(same[name]) for name, weight in weights.items())
    config = deepspeed_config(DeepSpeedConfig(zero_stage=3, param_offload=True), param_dtype="bf16", max_norm=1.0)
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_frozen_model_in_host_memory_gives_the_same_results(tiny_model_dir, stage):
    packs = [pack(make_sequences(5)), pack([])]
    found, places = [], []
    for offload in (False, True):
        hf_model, module = load_policy(tiny_model_dir, stage)
        settings = DeepSpeedConfig(zero_stage=stage).model_copy(update={"param_offload": offload})
        frozen = FrozenEngine(module, settings, param_dtype="fp32")
        weight = hf_model.model.norm.weight
        during: list[int] = []
        before = weight.data_ptr()

        def forward(model: Any, batch: Any, weight: torch.Tensor = weight, during: list[int] = during) -> torch.Tensor:
            during.append(weight.data_ptr())
            result: torch.Tensor = model(batch)[0]
            return result

        frozen.sleep()
        frozen.wake()
        found.append(frozen.infer(packs, forward))
        places.append((before == weight.data_ptr(), set(during) == {before}))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    if stage < 3:
        assert places == [(True, True), (True, False)]  # in the host copy when unused


@pytest.mark.parametrize("stage", [2, 3])
def test_layers_whose_inputs_are_in_host_memory_take_the_same_steps(tiny_model_dir, stage):
    (plain, weights), (offloaded, same) = (
        trained(tiny_model_dir, stage, zero={}, gradient_checkpointing=True, activation_offload=offload)
        for offload in (False, True)
    )
    assert plain == offloaded
    assert all(weight.equal(same[name]) for name, weight in weights.items())


def test_the_input_of_every_layer_is_kept_and_nothing_within_a_layer(tiny_model_dir):
    hf_model, module = load_policy(tiny_model_dir, 0, gradient_checkpointing=True)
    kept: list[tuple[int, ...]] = []

    def keep() -> AbstractContextManager[Any]:
        def taken(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tuple(tensor.shape))
            return tensor.clone()

        return torch.autograd.graph.saved_tensors_hooks(taken, lambda tensor: tensor)

    keep_saved_tensors(hf_model.get_decoder(), keep)
    module.train()
    batch = pack(make_sequences(4))
    module(batch)[0].sum().backward()
    size, tokens = hf_model.config.hidden_size, batch.input_ids_T.numel()
    assert kept.count((1, tokens, size)) >= hf_model.config.num_hidden_layers
    assert not [shape for shape in kept if hf_model.config.intermediate_size in shape]


def test_ranks_that_fall_into_no_groups_of_secondary_parts_are_refused():
    check_secondary_parts(DeepSpeedConfig(zero_stage=3, zpg=4), num_ranks=8)
    check_secondary_parts(DeepSpeedConfig(), num_ranks=3)
    with pytest.raises(UsageError, match="--zpg 4 does not divide 1 rank of the ref"):
        check_secondary_parts(DeepSpeedConfig(zero_stage=3, zpg=4), num_ranks=1, role="ref")


def test_roles_that_sleep_are_refused_beside_weights_in_host_memory():
    settings = DeepSpeedConfig(zero_stage=3, param_offload=True)
    with pytest.raises(UsageError, match="--param_offload: DeepSpeed cannot move states"):
        check_deepspeed(settings, param_dtype="bf16", sleeps=True)


def test_frozen_roles_are_offloaded_by_their_own_setting_and_at_stage_3_by_the_common_one():
    def offloaded(**settings: Any) -> set[str]:
        config = resolve("ppo", **settings)
        return {role for role in ROLES if config.deepspeed_of(role).param_offload}

    assert offloaded(ref_offload=True) == {"ref", "reward", "teacher"}
    assert offloaded(zero_stage=3, param_offload=True, ref_zero_stage=0) == {"actor", "critic", "reward", "teacher"}
    assert offloaded() == set()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_teacher_in_host_memory_gives_the_same_states_and_its_head_stays_on_the_device(tiny_llama_dir, stage):
    source = ModelConfig(pretrain=tiny_llama_dir, param_dtype="fp32")
    settings = DeepSpeedConfig(zero_stage=stage)
    plain = FrozenTeacher(source, settings)
    offloaded = FrozenTeacher(source, settings.model_copy(update={"param_offload": True}))
    head = offloaded.head.weight_VD
    places = [head.data_ptr()]

    class WatchedPack:
        """A pack that checks that the teacher's weights are loaded when it is moved to the device."""

        def __init__(self, items: int) -> None:
            self.pack = pack(make_sequences(items))

        def to(self, device: torch.device) -> Any:
            places.append(head.data_ptr())
            return self.pack.to(device)

    states, same = (teacher.hidden_states([WatchedPack(5), WatchedPack(0)]) for teacher in (plain, offloaded))
    assert all(one.equal(other) for one, other in zip(states, same, strict=True))
    assert {*places, head.data_ptr()} == {places[0]}
    assert head.equal(plain.head.weight_VD)


def test_only_parameters_that_do_not_stay_move_while_a_frozen_model_is_used(tiny_llama_dir):
    hf_model, module = load_policy(tiny_llama_dir, 0)
    head, norm = hf_model.lm_head.weight, hf_model.model.norm.weight
    settings = DeepSpeedConfig().model_copy(update={"param_offload": True})
    frozen = FrozenEngine(module, settings, param_dtype="fp32", staying=[head])
    before = [head.data_ptr(), norm.data_ptr()]

    def has_moved(model: Any, batch: Any) -> torch.Tensor:
        return torch.tensor([head.data_ptr() != before[0], norm.data_ptr() != before[1]])

    assert frozen.infer([pack(make_sequences(2))], has_moved)[0].tolist() == [False, True]
    assert [head.data_ptr(), norm.data_ptr()] == before


def test_a_teacher_is_offloaded_by_its_own_setting_and_at_stage_3_by_the_common_one():
    def offloaded(**given: Any) -> bool:
        least = {"pretrain": "m", "teacher_pretrain": "t", "dataset": "d", "output": "o"}
        return teacher_deepspeed(build_config(DistillConfig, least | given)).param_offload

    common = {"zero_stage": "3", "param_offload": "true"}
    assert offloaded(**common)
    assert not offloaded(**common, teacher_zero_stage="2")
    assert offloaded(teacher_offload="true")
    assert not offloaded()
