"""Muon under the real DeepSpeed: selected weights, steps at every stage, and rejected settings."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import (
    LEARNING_RATE,
    OPTIM,
    Items,
    Layout,
    farthest,
    load_policy,
    make_engine,
    make_sequences,
    train,
    weights_of,
)
from torch import nn

from rlhf_cli.algorithms.optimizer_steps import muon_update
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.backends.training.muon import FlatPart, Muon
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel, hidden_matrices

STEPS = [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
MUON = OPTIM.model_copy(update={"optim": "muon"})


def names_of(module: nn.Module, chosen: list[nn.Parameter]) -> set[str]:
    numbers = {id(parameter) for parameter in chosen}
    return {name for name, parameter in module.named_parameters() if id(parameter) in numbers}


def test_matrices_of_layers_are_hidden_and_embeddings_heads_and_vectors_are_not(tiny_model_dir, tiny_moe_dir):
    for path in (tiny_model_dir, tiny_moe_dir):
        hf_model, _ = load_policy(path, 0)
        expected = {name for name, p in hf_model.named_parameters() if ".layers." in name and p.ndim > 1}
        assert names_of(hf_model, hidden_matrices(hf_model)) == expected
    assert any(p.ndim == 3 for p in hidden_matrices(hf_model))  # stacked experts
    critic = ValueModel(load_value_backbone(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32")))
    assert not [name for name in names_of(critic, hidden_matrices(critic)) if ".layers." not in name]
    critic.requires_grad_(False)
    assert hidden_matrices(critic) == []


def trained_by_hand(path: str, items: Items) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train three steps in plain PyTorch, one parameter at a time; return weights and gradient norms."""
    hf_model, module = load_policy(path, 0)
    hidden = names_of(hf_model, hidden_matrices(hf_model))
    named = dict(hf_model.named_parameters())
    others = [p for name, p in named.items() if name not in hidden]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": MUON.l2},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=MUON.adam_betas)
    momentum = {name: torch.zeros_like(named[name]) for name in hidden}
    norms = []
    for indices in STEPS:
        chosen = [items.sequences[index] for index in indices]
        losses = torch.stack([-module(pack([sequence]))[0].sum() for sequence in chosen])
        module.zero_grad()
        (losses.sum() / sum(sequence.num_trained for sequence in chosen)).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), MUON.max_norm).item())
        adam.step()
        with torch.no_grad():
            for name in hidden:
                gradient = named[name].grad
                assert gradient is not None
                momentum[name] = 0.95 * momentum[name] + 0.05 * gradient
                direction = 0.05 * gradient + 0.95 * momentum[name]
                named[name] *= 1 - LEARNING_RATE * MUON.l2
                named[name] -= LEARNING_RATE * muon_update(direction)
    return {name: p.detach() for name, p in named.items()}, norms


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_three_steps_are_those_by_hand_with_the_norm_of_the_gradient(tiny_model_dir, stage):
    items = Items(make_sequences(9))
    expected, norms = trained_by_hand(tiny_model_dir, items)
    hf_model, module = load_policy(tiny_model_dir, stage)
    engine = make_engine(module, stage, optim=MUON)
    metrics = train(engine, items, STEPS, Layout(max_tokens=30))
    assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=1e-4)
    assert [step["lr"] for step in metrics] == [LEARNING_RATE] * 3
    assert farthest(weights_of(engine, hf_model), expected) < 1e-5


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_weights_learn_with_muon(tiny_model_dir, stage):
    _, module = load_policy(tiny_model_dir, stage, dtype="bf16")
    engine = make_engine(module, stage, dtype="bf16", optim=MUON, learning_rate=1e-2)
    metrics = train(engine, Items(make_sequences(7)), [list(range(7))] * 6, Layout(max_tokens=30))
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]


def test_a_step_is_that_of_pytorchs_muon():
    """PyTorch's version rounds to bfloat16 within the iteration."""
    start, gradients = torch.randn(12, 30), [torch.randn(12, 30) for _ in range(3)]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    groups: list[dict[str, Any]] = [{"params": [ours], "weight_decay": 0.1, "use_muon": True}]
    optimizer = Muon(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    reference = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    moved, difference = (theirs - start).norm(), (ours - theirs).norm()
    assert difference < 0.02 * moved


def test_a_part_has_the_ranges_worked_out_by_hand():
    """Matrices of 6 and 8 elements at offsets 0 and 6, in partitions of 5: the first is cut at 5, the second at 10."""
    first, second = (0, torch.Size([2, 3])), (6, torch.Size([2, 4]))
    parts = [FlatPart(start, 5, (first, second)) for start in (0, 5, 10)]
    assert [part.range_of(*first) for part in parts] == [(0, 5), (5, 6), (10, 10)]
    assert [part.range_of(*second) for part in parts] == [(0, 0), (0, 4), (4, 8)]
    assert all(part.is_cut(*first) and part.is_cut(*second) for part in parts)
    assert not FlatPart(0, 6, (first,)).is_cut(*first)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 1])
def test_a_critic_with_frozen_layers_learns(tiny_llama_dir, stage):
    critic = ValueModel(load_value_backbone(ModelConfig(pretrain=tiny_llama_dir, param_dtype="fp32")))
    for name, parameter in critic.named_parameters():
        parameter.requires_grad_("layers.0." not in name)
    before = {name: parameter.detach().clone() for name, parameter in critic.named_parameters()}
    engine = make_engine(critic, stage, optim=MUON)
    packs, _ = Layout().share().micro_batches(Items(make_sequences(3)), np.arange(3))
    losses = [engine.train_step(packs, squared_error)["loss"] for _ in range(3)]
    still = {name for name, p in critic.named_parameters() if p.equal(before[name])}
    assert still == {name for name in before if "layers.0." in name}
    assert losses[-1] < losses[0]


def squared_error(model: nn.Module, batch: Any) -> Any:
    loss = (model(batch) - 1).square().mean()
    return loss, {"loss": loss.detach()}


def test_stage_3_is_refused():
    with pytest.raises(UsageError, match="--optim muon requires full matrices, but --zero_stage 3 partitions them"):
        check_deepspeed(DeepSpeedConfig(zero_stage=3), param_dtype="bf16", optimizer="muon")
    with pytest.raises(UsageError, match="--optim muon: --adam_offload works only with --optim adamw"):
        check_deepspeed(DeepSpeedConfig(adam_offload=True), param_dtype="bf16", optimizer="muon")
