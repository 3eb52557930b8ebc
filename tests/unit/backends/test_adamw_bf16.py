"""AdamW in bfloat16 under the real DeepSpeed: unbiased, keeps small updates, uses six bytes per parameter."""

from typing import Any

import pytest
import torch
from tiny_training import OPTIM, Items, Layout, load_policy, make_engine, make_sequences, train, weights_of
from torch import nn

from rlhf_cli.backends.training.adamw_bf16 import AdamWBf16, chunks, rounded_stochastically
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.backends.training.deepspeed_weights import EngineWeights
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel

BF16 = OPTIM.model_copy(update={"optim": "adamw_bf16"})
SPACING = 2.0**-7
"""Largest relative spacing of bfloat16 numbers."""


def optimizer_of(parameter: nn.Parameter, **settings: Any) -> AdamWBf16:
    standard: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    return AdamWBf16([parameter], **standard | settings)


def test_a_value_becomes_one_of_its_neighbours_and_is_right_in_the_mean():
    values = torch.tensor([1.0, 1.001, -1.001, 3.14159, -1e-30, 0.0, 65_000.0])
    drawn = torch.stack(
        [rounded_stochastically(values, torch.Generator().manual_seed(seed)) for seed in range(4000)]
    ).double()
    distance = (drawn - values.double()).abs()
    assert (distance <= SPACING * values.double().abs()).all()
    assert all(
        len(column.unique()) == (1 if value in (1.0, 0.0) else 2)
        for value, column in zip(values.tolist(), drawn.T, strict=True)
    )
    scale = values.double().abs().clamp(min=1e-300)
    # The standard error is at most SPACING / 2 / sqrt(4000).
    assert ((drawn.mean(0) - values.double()).abs() / scale).max() < 4 * SPACING / 2 / 4000**0.5


def test_three_steps_stay_within_rounding_of_float64():
    torch.manual_seed(0)
    start, gradients = torch.randn(50, 4).bfloat16(), [torch.randn(50, 4).bfloat16() for _ in range(3)]
    exact, rounded = nn.Parameter(start.double()), nn.Parameter(start.clone())
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    reference, optimizer = torch.optim.AdamW([exact], **settings), optimizer_of(rounded, **settings)
    for number, gradient in enumerate(gradients, start=1):
        exact.grad, rounded.grad = gradient.double(), gradient
        reference.step()
        optimizer.step()
        # Each step rounds the weight and the moments, which changes the next step by about the learning rate.
        error = (rounded.double() - exact).abs()
        assert (error <= number * (SPACING * exact.abs() + 2 * SPACING * settings["lr"])).all()


def test_small_updates_are_not_lost_over_a_thousand_steps():
    """Each update changes a weight of 1 by 1e-4, 1/40 of the spacing; rounding to nearest would lose all of them."""
    weight = nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
    optimizer = optimizer_of(weight, lr=1e-4)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.double().mean().item() == pytest.approx(0.9, abs=0.002)
    assert torch.ones(1).bfloat16().sub_(1e-4).item() == 1.0


def test_a_second_moment_falls_by_its_decay_rate():
    """The decay by a factor of 0.999 is a quarter of the spacing; rounding to nearest would lose it."""
    weight = nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))
    optimizer = optimizer_of(weight, betas=(0.9, 0.999))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad = torch.zeros_like(weight)
    for _ in range(500):
        optimizer.step()
    found = optimizer.state[weight]["exp_avg_sq"].double().mean().item()
    assert found == pytest.approx(1e-3 * 0.999**500, rel=0.01)


def test_equal_runs_are_equal_and_other_steps_ranks_and_tensors_draw_other_noise():
    def moments(rank: int) -> list[list[float]]:
        weights = [nn.Parameter(torch.zeros(100, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = AdamWBf16(weights, lr=0.0, betas=(0.9, 0.95), eps=1e-8, rank=rank)
        found: list[list[float]] = []
        for _ in range(300):  # noise that repeats after 256 steps would show in the low bits of the step number
            for weight in weights:
                optimizer.state.pop(weight, None)
                optimizer.state[weight] = {
                    "step": torch.tensor(float(len(found) // 2)),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }
                weight.grad = torch.full_like(weight, 1.01)
            optimizer.step()
            found += [optimizer.state[weight]["exp_avg"].tolist() for weight in weights]
        return found

    first, again, other = moments(0), moments(0), moments(1)
    assert first == again
    assert len({tuple(drawn) for drawn in first + other}) == 2 * 300 * 2


def test_a_step_left_out_changes_nothing():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = optimizer_of(weight)
    weight.grad, optimizer.found_inf = torch.ones_like(weight), torch.ones(())
    optimizer.step()
    assert weight.tolist() == [1.0] * 3
    assert not optimizer.state


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (2, 9, 4)])
def test_chunks_have_every_element_once(shape):
    tensor = torch.zeros(shape)
    for other, part in chunks(torch.zeros(shape), tensor, size=6):
        assert other.shape == part.shape
        assert part.numel() <= max(6, tensor[:1].numel() if shape else 1)
        part += 1
    assert tensor.eq(1).all()


def states_of(engine: Any) -> list[torch.Tensor]:
    """Return the optimizer state tensors of all parameters."""
    inner = engine._engine.optimizer
    base = getattr(inner, "optimizer", inner)
    return [value for state in base.state.values() for name, value in state.items() if name != "step"]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_and_states_take_six_bytes_a_parameter(tiny_model_dir, stage):
    _, module = load_policy(tiny_model_dir, stage, dtype="bf16")
    engine = make_engine(module, stage, dtype="bf16", optim=BF16)
    train(engine, Items(make_sequences(3)), [[0, 1, 2]], Layout())
    weights = [getattr(p, "ds_tensor", p) for p in module.parameters()]
    masters = [p for group in engine._engine.basic_optimizer.param_groups for p in group["params"]]
    mappings = [getattr(p, "_hp_mapping", None) for p in module.parameters()]
    fragments = [one.hp_fragment for one in mappings if one is not None]
    assert bool(fragments) == (stage in (1, 2))
    storages = [tensor.untyped_storage() for tensor in [*weights, *masters, *fragments]]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    states = states_of(engine)
    assert {tensor.dtype for tensor in [*weights, *masters, *states]} == {torch.bfloat16}
    num = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
    total = sum(held.values()) + sum(tensor.untyped_storage().nbytes() for tensor in states)
    assert 6 <= total / num < 6.5  # DeepSpeed pads its flat tensors
    assert engine.checkpoint_bytes() == 8 * num


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_saved_engine_has_the_weights_that_rlhf_merge_reads(tiny_model_dir, tmp_path, stage):
    hf_model, module = load_policy(tiny_model_dir, stage, dtype="bf16")
    engine = make_engine(module, stage, dtype="bf16", optim=BF16)
    train(engine, Items(make_sequences(3)), [[0, 1, 2]], Layout())
    engine.save(tmp_path)
    saved = EngineWeights(tmp_path, torch.bfloat16)
    expected = weights_of(engine, hf_model)
    assert all(saved.read(name).equal(weight) for name, weight in expected.items())


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 2])
def test_a__and_a_critic_train_and_frozen_weights_stay(tiny_llama_dir, stage):
    critic = ValueModel(load_value_backbone(ModelConfig(pretrain=tiny_llama_dir, param_dtype="bf16")))
    for name, parameter in critic.named_parameters():
        parameter.requires_grad_("layers.0." not in name)
    before = {name: parameter.detach().clone() for name, parameter in critic.named_parameters()}
    engine = make_engine(critic, stage, dtype="bf16", optim=BF16, learning_rate=1e-2)
    packs, _ = Layout().share().micro_batches(Items(make_sequences(3)), torch.arange(3).numpy())
    engine.train_step(packs, lambda model, batch: (model(batch).square().mean(), {}))
    after = dict(critic.named_parameters())
    still = {name for name in before if before[name].equal(after[name])}
    assert still >= {name for name in before if "layers.0." in name}
    assert "model.score.weight" in before.keys() - still


@pytest.mark.parametrize(
    ("settings", "others", "reason"),
    [
        ({}, {"param_dtype": "fp32"}, "adamw_bf16 requires --param_dtype bf16"),
        ({"adam_offload": True}, {}, "--adam_offload works only with --optim adamw"),
        ({"zero_stage": 1, "grad_accum_dtype": "fp32"}, {}, "with bf16 weights requires --zero_stage 2 or higher"),
        ({"zero_stage": 3}, {"sleeps": True}, "can move only the states of its AdamW; use --zero_stage 2"),
    ],
)
def test_combinations_that_deepspeed_lacks_are_refused(settings, others, reason):
    with pytest.raises(UsageError, match=reason):
        check_deepspeed(DeepSpeedConfig(**settings), **({"param_dtype": "bf16", "optimizer": "adamw_bf16"} | others))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(("stage", "dtype", "norm"), [(2, "fp32", 257), (2, None, 256), (3, None, 256), (1, None, 256)])
def test_gradients_add_up_in_bf16_unless_float32_is_asked_for(stage, dtype, norm):
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    engine = make_engine(Counter(), stage, dtype="bf16", optim=BF16, grad_accum_dtype=dtype)
    ones = [torch.ones(1, dtype=torch.bfloat16)] * 257
    metrics = engine.train_step(ones, lambda model, x: (model(x).sum(), {}))
    assert metrics["grad_norm"] == pytest.approx(norm, abs=0.01)
