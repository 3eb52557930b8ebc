"""One rank of actor, critic and reference on the real engine: adapters, moving averages, updated references."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_training import OPTIM, make_sequences
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.backends.roles.groups import RoleGroup
from rlhf_cli.backends.roles.ranks import ActorRank, CriticRank, FrozenPolicyRank, RewardRank, join_and_load
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.student_rank import StudentRank
from rlhf_cli.backends.rollout.engine_host import HOST_ENGINE, host_engine
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.weight_sync.vllm_trainer import tensor_specs
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.config.roles import ROLES, STUDENT_ROLES
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.models.adapters import WEIGHTS_FILE, plan_adapter, read_config
from rlhf_cli.models.merging import FoldedAdapter
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.quantised import dense, dense_layout
from rlhf_cli.models.weight_files import SafetensorsFiles, TensorSource, folder_of, open_weights
from rlhf_cli.trainers.offline.loop import bind
from rlhf_cli.trainers.offline.sft import sft_objective

pytestmark = pytest.mark.usefixtures("group_of_one")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def role_settings(
    pretrain: str,
    stage: int,
    *,
    dtype: str = "fp32",
    lora_rank: int = 0,
    ema_beta: float | None = None,
    target_modules: Sequence[str] = ("all-linear",),
    **variant: bool,
) -> RoleSettings:
    lora = LoraConfig(lora_rank=lora_rank, target_modules=list(target_modules), **variant)  # type: ignore[arg-type]
    model = ModelConfig(pretrain=pretrain, param_dtype=dtype)  # type: ignore[arg-type]
    return RoleSettings(
        model=model,
        deepspeed=DeepSpeedConfig(zero_stage=stage),  # type: ignore[arg-type]
        optim=OPTIM,
        learning_rate=1e-2,
        total_steps=10,
        seed=0,
        temperature=1.0,
        max_new_tokens=8,
        policy=ActorCriticPolicyConfig(),
        adapter=plan_adapter(model, lora, seed=1) if lora_rank else None,
        ema_beta=ema_beta,
    )


@pytest.mark.parametrize(("stage", "is_partitioned"), [(2, False), (3, True)])
def test_a_role_reads_its_weights_onto_its_own_device(tiny_model_dir, stage, is_partitioned):
    asked: dict[str, Any] = {}
    model: Any = torch.nn.Linear(1, 1)
    model.config = AutoConfig.for_model("qwen2")

    def load(source, **how):
        asked.update(how, pretrain=source.pretrain)
        return model

    assert join_and_load(role_settings(tiny_model_dir, stage), load) is model
    assert (asked["pretrain"], asked["device"]) == (tiny_model_dir, distributed.device())
    assert (asked["partition"] is not None) == is_partitioned


def train(actor: ActorRank, steps: int = 1) -> None:
    """Train on arbitrary data to change the weights."""
    sequences = make_sequences(4)
    totals = StepTotals(sum(sequence.num_trained for sequence in sequences), len(sequences))
    for _ in range(steps):
        actor.engine.train_step([pack(sequences)], bind(sft_objective, totals))
        actor.update_average()


def own_weights(actor: ActorRank) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in actor.engine.named_weights(actor.hf_model)}


def engine_weights(actor: ActorRank) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in actor.engine_weights()}


def logprobs(actor: ActorRank, method: str = "logprobs") -> np.ndarray:
    return getattr(actor, method)([make_sequences(5)])[0]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(weight.equal(other[name]) for name, weight in one.items())


@pytest.mark.parametrize("variant", [{}, {"use_dora": True, "use_rslora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_engines_get_what_merge_would_write_and_the_trainer_keeps_its_own_bit_for_bit(
    tiny_model_dir, tmp_path, stage, variant
):
    actor = ActorRank(role_settings(tiny_model_dir, stage, lora_rank=4, **variant))
    train(actor)
    before = own_weights(actor)
    pushed = engine_weights(actor)
    assert equal(before, own_weights(actor))
    actor.save_model(tmp_path / "adapter")
    base = open_weights(folder_of(tiny_model_dir))
    adapter = SafetensorsFiles([tmp_path / "adapter" / WEIGHTS_FILE])
    merged = FoldedAdapter(base, adapter, read_config(tmp_path / "adapter"))
    assert set(pushed) == set(merged.names())
    assert all(weight.equal(merged.read(name)) for name, weight in pushed.items())
    changed = [name for name, weight in pushed.items() if not weight.equal(base.read(name))]
    assert {name.rsplit(".", 2)[1] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_pushed_bf16_weights_are_rounded_once(tiny_model_dir, stage):
    actor = ActorRank(role_settings(tiny_model_dir, stage, dtype="bf16", lora_rank=4))
    train(actor)
    own, name = own_weights(actor), "model.layers.0.self_attn.q_proj"
    a_RI, b_OR = (own[f"{name}.{kind}.default.weight"].float() for kind in ("lora_A", "lora_B"))
    assert b_OR.abs().max() > 0
    expected = (own[f"{name}.base_layer.weight"].float() + 4.0 * (b_OR @ a_RI)).bfloat16()  # alpha 16, rank 4
    assert engine_weights(actor)[f"{name}.weight"].equal(expected)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_reference_of_an_adapter_is_its_base_and_engines_say_what_the_trainer_says(tiny_model_dir, stage, use_dora):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    actor = ActorRank(role_settings(tiny_model_dir, stage, lora_rank=4, use_dora=use_dora))
    untrained = logprobs(actor)
    assert logprobs(actor, "base_logprobs").tolist() == untrained.tolist()  # a new adapter changes nothing
    train(actor, steps=3)
    assert logprobs(actor, "base_logprobs").tolist() == untrained.tolist()
    assert np.abs(logprobs(actor) - untrained).max() > 0.05
    plain.load_state_dict(engine_weights(actor), strict=False)
    with torch.no_grad():
        merged = PolicyModel(plain)(pack(make_sequences(5)))[0]
    assert merged.numpy() == pytest.approx(logprobs(actor), abs=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_new_dora_leaves_the_pushed_bf16_weights_as_they_are_on_disk(tiny_model_dir, stage):
    """DoRA magnitudes are rounded to bfloat16; without correction rows would differ by up to 1/256."""
    actor = ActorRank(role_settings(tiny_model_dir, stage, dtype="bf16", lora_rank=4, use_dora=True))
    base = open_weights(folder_of(tiny_model_dir))
    assert all(weight.equal(base.read(name).bfloat16()) for name, weight in engine_weights(actor).items())


def test_packed_weights_are_dequantized_one_by_one_and_announced_by_the_layout_they_stand_for():
    packed = torch.nn.Parameter(torch.tensor([[1], [2]], dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(shape=torch.Size([2, 2]), dtype=torch.bfloat16)  # type: ignore[attr-defined]
    plain = torch.nn.Parameter(torch.ones(3))
    named = {"packed": packed, "plain": plain}

    def dequantize(tensor, state):
        return tensor.expand(state.shape).to(state.dtype) * 3

    found = dict(dense([(name, p.detach()) for name, p in named.items()], named, dequantize=dequantize))
    assert found["packed"].tolist() == [[3, 3], [6, 6]]
    assert found["plain"].tolist() == [1, 1, 1]
    assert dense_layout(packed) == ((2, 2), torch.bfloat16)
    assert dense_layout(plain) == ((3,), torch.float32)


def test_without_an_adapter_the_engines_get_the_weights_as_they_are(tiny_model_dir):
    actor = ActorRank(role_settings(tiny_model_dir, 2))
    train(actor)
    assert equal(engine_weights(actor), own_weights(actor))


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_engines_get_every_expert_of_a_mixture_by_its_name(tiny_moe_dir, tmp_path, stage, lora_rank):
    linear = ATTENTION if lora_rank else ["all-linear"]
    actor = ActorRank(role_settings(tiny_moe_dir, stage, lora_rank=lora_rank, target_modules=linear))
    train(actor)
    actor.save_model(tmp_path / "saved")
    base = open_weights(folder_of(tiny_moe_dir))
    saved = tmp_path / "saved"
    if lora_rank:
        written: TensorSource = FoldedAdapter(base, SafetensorsFiles([saved / WEIGHTS_FILE]), read_config(saved))
    else:
        written = open_weights(saved)
    pushed = engine_weights(actor)
    assert set(pushed) == set(base.names())
    assert all(weight.equal(written.read(name)) for name, weight in pushed.items())
    changed = " ".join(name for name, weight in pushed.items() if not weight.equal(base.read(name)))
    assert ".self_attn." in changed
    assert (".mlp.experts." in changed) == (lora_rank == 0)  # adapters apply to linear layers, and experts are not


def test_engines_are_told_the_shapes_of_a_mixture_before_the_push(tiny_moe_dir):
    actor = ActorRank(role_settings(tiny_moe_dir, 3))
    announced = [(spec.name, spec.shape, spec.dtype) for spec in tensor_specs(actor.hf_model)]
    assert announced == [(name, tuple(w.shape), w.dtype) for name, w in engine_weights(actor).items()]


@pytest.mark.parametrize(("stage", "later"), [(2, 2), (3, 3), (2, 3), (3, 0)])
def test_a_critic_trains_its_adapter_and_its_head_alone(tiny_model_dir, tmp_path, stage, later):
    critic = CriticRank(role_settings(tiny_model_dir, stage, lora_rank=4))
    trained = {name for name, p in critic.hf_model.named_parameters() if p.requires_grad}
    assert "score.weight" in trained
    assert all(".lora_" in name for name in trained - {"score.weight"})
    critic.save(tmp_path)
    again = CriticRank(role_settings(tiny_model_dir, later, lora_rank=4))
    again.load(tmp_path)
    found, expected = again.values([make_sequences(5)])[0], critic.values([make_sequences(5)])[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 if later != stage else 0)


@pytest.mark.parametrize(
    ("stage", "lora_rank", "later"), [(0, 0, 0), (2, 0, 2), (3, 0, 3), (3, 4, 3), (2, 0, 3), (3, 0, 0), (3, 4, 2)]
)
def test_the_average_follows_every_step_and_goes_on_from_a_checkpoint(
    tiny_model_dir, tmp_path, stage, lora_rank, later
):
    def averaged(actor: ActorRank) -> dict[str, torch.Tensor]:
        assert actor._average is not None
        return dict(actor._average.weights())

    settings = role_settings(tiny_model_dir, stage, lora_rank=lora_rank, ema_beta=0.75)
    actor = ActorRank(settings)
    trained = {name for name, p in actor.hf_model.named_parameters() if p.requires_grad}
    expected = own_weights(actor)
    for _ in range(2):
        train(actor)
        expected = {name: 0.75 * expected[name] + 0.25 * weight for name, weight in own_weights(actor).items()}
    found = averaged(actor)
    assert found.keys() == trained
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    actor.save(tmp_path / "saved")
    again = ActorRank(replace(settings, deepspeed=DeepSpeedConfig(zero_stage=later)))
    again.load(tmp_path / "saved")
    train(actor)
    train(again)
    tolerance = 1e-6 if later != stage else 0
    for name, weight in averaged(actor).items():
        torch.testing.assert_close(averaged(again)[name], weight, rtol=0, atol=tolerance)
    actor.save_average(tmp_path / "ema")
    written = load_file(tmp_path / "ema" / (WEIGHTS_FILE if lora_rank else "model.safetensors"))
    assert {tuple(weight.shape) for weight in written.values()} == {tuple(w.shape) for w in found.values()}
    if not lora_rank:
        assert equal(written, averaged(actor))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reference_moves_towards_the_actor_by_its_share(tiny_model_dir, tmp_path, stage):
    actor, reference = (
        ActorRank(role_settings(tiny_model_dir, stage)),
        FrozenPolicyRank(role_settings(tiny_model_dir, stage)),
    )
    start = own_weights(actor)
    train(actor)
    for number in range(actor.num_buckets()):
        reference.move(actor.bucket(number).items(), 0.25)
    reference.save(tmp_path)
    moved = load_file(tmp_path / "reference.safetensors")
    for name, weight in own_weights(actor).items():
        torch.testing.assert_close(moved[name], 0.75 * start[name] + 0.25 * weight, rtol=0, atol=1e-6)
    again = FrozenPolicyRank(role_settings(tiny_model_dir, stage))
    again.load(tmp_path)
    assert np.array_equal(again.logprobs([make_sequences(5)])[0], reference.logprobs([make_sequences(5)])[0])
    assert not np.array_equal(reference.logprobs([make_sequences(5)])[0], logprobs(actor))


def test_what_is_saved_of_an_adapter_is_an_adapter(tiny_model_dir, tmp_path: Path):
    actor = ActorRank(role_settings(tiny_model_dir, 2, lora_rank=4))
    actor.save_model(tmp_path / "model")
    assert {"adapter_config.json", WEIGHTS_FILE} <= {path.name for path in (tmp_path / "model").iterdir()}
    assert not (tmp_path / "model" / "config.json").exists()


def test_every_role_has_a_class_of_that_name():
    assert {role.name: resolve_name(role.rank) for role in ROLES.values()} == {
        "actor": ActorRank,
        "critic": CriticRank,
        "ref": FrozenPolicyRank,
        "reward": RewardRank,
        "teacher": FrozenPolicyRank,
    }
    assert resolve_name(STUDENT_ROLES["actor"].rank) is StudentRank
    assert all(issubclass(resolve_name(role.driver), RoleGroup) for role in (*ROLES.values(), STUDENT_ROLES["actor"]))
    assert resolve_name(HOST_ENGINE) is host_engine
