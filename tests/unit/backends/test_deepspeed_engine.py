"""The engine on one rank with real DeepSpeed: results do not depend on micro-batches or partitioning."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import (
    CLOSE,
    LEARNING_RATE,
    OPTIM,
    Items,
    Layout,
    farthest,
    file_bytes,
    load_policy,
    make_engine,
    make_sequences,
    train,
    train_plainly,
    weights_of,
)
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_cli.algorithms.aggregation import StepTotals, token_mean
from rlhf_cli.algorithms.objective import value_objective
from rlhf_cli.backends.training.frozen_model import FrozenEngine
from rlhf_cli.backends.training.random_states import seed_everything
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.data.packing.packs import TokenSequence, micro_batch, pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_causal_lm, load_value_backbone
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.trainers.offline.loop import bind
from rlhf_cli.trainers.offline.sft import sft_objective

STAGES = (0, 1, 2, 3)
TYPES = [("fp32", "adamw"), ("bf16", "adamw"), ("bf16", "adamw_bf16")]
"""Weight types and optimizers that are tested at every stage."""
WITH_MUON = [
    *((stage, *kind) for kind in TYPES for stage in STAGES),
    *((stage, dtype, "muon") for dtype in ("fp32", "bf16") for stage in STAGES[:3]),
]
"""These with their stages, and Muon, which has no stage 3."""
STEPS = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]


pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.fixture
def items() -> Items:
    return Items(make_sequences(12))


@pytest.mark.parametrize("stage", STAGES)
def test_three_steps_equal_plain_pytorch(tiny_model_dir, items, stage):
    hf_model, plain = load_policy(tiny_model_dir, 0)
    expected = train_plainly(plain, items, STEPS)
    assert all(metrics["grad_norm"] > OPTIM.max_norm for metrics in expected)  # so that clipping matters
    expected_weights = {name: weight.detach() for name, weight in hf_model.named_parameters()}

    hf_model, module = load_policy(tiny_model_dir, stage)
    engine = make_engine(module, stage)
    metrics = train(engine, items, STEPS, Layout())

    for got, wanted in zip(metrics, expected, strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert got["lr"] == LEARNING_RATE
    assert farthest(weights_of(engine, hf_model), expected_weights) < CLOSE


def test_a_single_rank_in_float32_copies_neither_gradients_nor_weights(tiny_model_dir, items, monkeypatch):
    engine = make_engine(load_policy(tiny_model_dir, 0)[1], 0)
    monkeypatch.setattr(type(engine._engine), "buffered_allreduce_fallback", None)
    assert math.isfinite(train(engine, items, STEPS[:1], Layout())[0]["loss"])

    engine = make_engine(load_policy(tiny_model_dir, 2)[1], 2)
    parts = engine._engine.optimizer
    # The last rank would copy the sums of gradients into one tensor.
    monkeypatch.setattr(parts, "flatten_dense_tensors_aligned", None)
    assert math.isfinite(train(engine, items, STEPS[:1], Layout())[0]["loss"])
    weights = [flat.data_ptr() for flat in parts.bit16_groups_flat]
    assert [master.data_ptr() for master in parts.single_partition_of_fp32_groups] == weights


@pytest.mark.parametrize("layout", [Layout(max_sequences=1), Layout(max_tokens=12), Layout(max_tokens=30)], ids=str)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_micro_batches_do_not_change_a_step(tiny_model_dir, items, stage, layout):
    results = []
    for cut in (Layout(), layout):
        items.sizes.clear()
        hf_model, module = load_policy(tiny_model_dir, stage)
        engine = make_engine(module, stage)
        metrics = train(engine, items, STEPS, cut)
        results.append((metrics, weights_of(engine, hf_model), list(items.sizes)))
    (whole, whole_weights, whole_sizes), (cut_up, cut_up_weights, sizes) = results
    assert whole_sizes == [7, 2, 3]
    assert len(sizes) > 3
    for one, other in zip(whole, cut_up, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert farthest(whole_weights, cut_up_weights) < CLOSE


def value_samples(count: int) -> list[TokenSequence]:
    rng = np.random.default_rng(3)
    return [
        replace(
            sequence,
            columns={name: rng.normal(size=sequence.num_trained).astype(np.float32) for name in VALUE_COLUMNS},
        )
        for sequence in make_sequences(count)
    ]


def spoiled_step(engine: Any, items: Items, *, what: str) -> dict[str, float]:
    """Run a step in which the loss of one micro-batch, or only its gradient, is not finite."""
    micro_batches, totals = Layout(max_sequences=2).share().micro_batches(items, np.arange(4))
    last = micro_batches[-1]
    objective = bind(sft_objective, totals)

    def loss(model: nn.Module, batch: Any) -> Any:
        value, metrics = objective(model, batch)
        if batch.input_ids_T.equal(last.input_ids_T):
            # sqrt has infinite slope at 0
            value = value + torch.inf if what == "loss" else value + (value - value).sqrt()
        return value, metrics

    return engine.train_step(micro_batches, loss)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(("stage", "dtype", "optimizer"), WITH_MUON)
def test_a_step_that_is_not_finite_leaves_no_trace_but_its_count(tiny_model_dir, items, stage, dtype, optimizer, what):
    optim = OPTIM.model_copy(update={"optim": optimizer})
    results = []
    for is_spoiled in (False, True):
        hf_model, module = load_policy(tiny_model_dir, stage, dtype=dtype)
        engine = make_engine(module, stage, dtype=dtype, optim=optim)
        metrics = train(engine, items, STEPS[:1], Layout())
        if is_spoiled:
            before = weights_of(engine, hf_model)
            spoiled = spoiled_step(engine, items, what=what)
            assert not math.isfinite(spoiled["grad_norm"])
            assert spoiled["skipped_steps"] == 1
            assert all(weight.equal(before[name]) for name, weight in weights_of(engine, hf_model).items())
        metrics += train(engine, items, STEPS[1:], Layout())
        results.append(([m | {"skipped_steps": 0.0} for m in metrics], weights_of(engine, hf_model)))
        assert metrics[-1]["skipped_steps"] == float(is_spoiled)
    (metrics, weights), (others, other_weights) = results
    assert metrics == others
    assert all(weight.equal(other_weights[name]) for name, weight in weights.items())


def test_a_good_step_starts_the_count_of_those_skipped_in_a_row_anew(tiny_model_dir, items):
    _, module = load_policy(tiny_model_dir, 2)
    engine = make_engine(module, 2)
    found = [spoiled_step(engine, items, what="loss") for _ in range(2)]
    found += train(engine, items, STEPS[:1], Layout())
    found.append(spoiled_step(engine, items, what="loss"))
    assert [step["skipped_in_a_row"] for step in found] == [1, 2, 0, 1]
    assert [step["skipped_steps"] for step in found] == [1, 2, 2, 3]


VALUE_COLUMNS = ("old_values", "returns")


@pytest.mark.parametrize(("stage", "loss_agg"), [(0, "token_mean"), (3, "seq_mean")])
def test_a_critic_packed_learns_as_one_by_one(tiny_model_dir, stage, loss_agg):
    samples = value_samples(7)
    totals = StepTotals(sum(sample.num_trained for sample in samples), len(samples))

    def loss(model: nn.Module, batch: Any) -> Any:
        return value_objective(
            model(batch.pack),
            old_values_K=batch.columns["old_values"],
            returns_K=batch.columns["returns"],
            cu=batch.pack.cu_trained,
            value_clip=0.5,
            loss_agg=loss_agg,
            totals=totals,
            max_new_tokens=9,
        )

    results = []
    for micro_batches in ([samples], [[sample] for sample in samples]):
        hf_model = load_value_backbone(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32"))
        engine = make_engine(ValueModel(hf_model), stage)
        packs = [micro_batch(chosen, names=VALUE_COLUMNS) for chosen in micro_batches]
        metrics = [engine.train_step(packs, loss) for _ in range(2)]
        results.append((metrics, weights_of(engine, hf_model)))
    (packed, packed_weights), (single, single_weights) = results
    for one, other in zip(packed, single, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert packed[1]["value_loss"] < packed[0]["value_loss"]
    assert farthest(packed_weights, single_weights) < CLOSE


class Scale(nn.Module):
    """Two weights and a bias, whose gradients can be calculated manually."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))
        self.bias = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x_K2: torch.Tensor) -> torch.Tensor:
        return (x_K2 @ self.weight.T + self.bias).squeeze(1)


def mean_of_two(model: nn.Module, x_K2: torch.Tensor) -> Any:
    loss = token_mean(model(x_K2), StepTotals(2, 2))
    return loss, {"loss": loss.detach(), "output_max": model(x_K2).detach().max()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_worked_out_by_hand(stage):
    """Outputs 1*3 + 2*8 + .5 = 19.5 and 1*9 + 2*8 + .5 = 25.5, mean 22.5; gradient (6, 8), 1 with norm sqrt(101).

    The gradient is clipped to norm 1. Adam's first step is its sign times the learning rate, after weight decay of 10 %
    of the rate, which excludes the bias. The second step has the same gradient and is equal.
    """
    model = Scale()
    engine = make_engine(model, stage, optim=OPTIM.model_copy(update={"max_norm": 1.0}))
    metrics = engine.train_step([torch.tensor([[3.0, 8.0]]), torch.tensor([[9.0, 8.0]])], mean_of_two)
    assert metrics == pytest.approx(
        {"loss": 22.5, "output_max": 25.5, "grad_norm": math.sqrt(101), "lr": LEARNING_RATE}
        | {"skipped_steps": 0.0, "skipped_in_a_row": 0.0},
        rel=1e-6,
    )
    rate = LEARNING_RATE
    expected = [1 * (1 - 0.1 * rate) - rate, 2 * (1 - 0.1 * rate) - rate]
    assert model.weight.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert model.bias.item() == pytest.approx(0.5 - rate, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e6])
def test_gradients_are_clipped_to_the_norm_and_no_further(stage, max_norm):
    """Adam is invariant to the scale of the first gradient, but not to its ratio to the second."""
    model, plain = Scale(), Scale()
    optim = OPTIM.model_copy(update={"max_norm": max_norm, "l2": 0.0})
    engine = make_engine(model, stage, optim=optim)
    adam = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE, betas=OPTIM.adam_betas, weight_decay=0.0)
    for x in (torch.tensor([[3.0, 8.0], [9.0, 8.0]]), torch.tensor([[0.01, 0.02], [0.01, -0.04]])):
        engine.train_step([x], mean_of_two)
        adam.zero_grad()
        plain(x).mean().backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in plain.parameters() if p.grad is not None) + torch.zeros(()))
        scale = min(1.0, max_norm / norm.item()) if max_norm else 1.0
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad *= scale
        adam.step()
    assert torch.allclose(model.weight, plain.weight, rtol=1e-5, atol=0)
    assert torch.allclose(model.bias, plain.bias, rtol=1e-5, atol=0)


def test_the_loss_of_a_uniform_model_is_the_logarithm_of_its_vocabulary(tiny_llama_dir, items):
    hf_model, module = load_policy(tiny_llama_dir, 0)
    nn.init.zeros_(hf_model.lm_head.weight)
    metrics = train(make_engine(module, 0), items, STEPS[:1], Layout())
    assert metrics[0]["loss"] == pytest.approx(math.log(300), rel=1e-6)


def test_the_loss_is_that_of_the_hugging_face_model(tiny_model_dir, items):
    hf_model, _ = load_policy(tiny_model_dir, 0, attn_implementation="sdpa")
    total, count = 0.0, 0
    for sequence in (items.sequences[index] for index in STEPS[0]):
        ids = torch.from_numpy(sequence.token_ids).long()
        labels = torch.where(torch.from_numpy(sequence.loss_mask), ids, -100)
        with torch.no_grad():
            total += hf_model(input_ids=ids[None], labels=labels[None]).loss.item() * sequence.num_trained
        count += sequence.num_trained
    _, module = load_policy(tiny_model_dir, 2)
    metrics = train(make_engine(module, 2), items, STEPS[:1], Layout())
    assert metrics[0]["loss"] == pytest.approx(total / count, rel=1e-5)


GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gpt2_trains_without_its_default_dropout_as_in_evaluation(checkpointing, items, tmp_path):
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(tmp_path)
    hf_model, module = load_policy(str(tmp_path), 2, gradient_checkpointing=checkpointing)
    # The config keeps the values for saving.
    assert hf_model.config.attn_pdrop == hf_model.config.resid_pdrop == hf_model.config.embd_pdrop == 0.1
    engine = make_engine(module, 2)
    micro_batches, totals = Layout().share().micro_batches(items, np.array(STEPS[0]))
    expected = engine.evaluate(micro_batches, bind(sft_objective, totals))["loss"]
    before = weights_of(engine, hf_model)
    assert engine.train_step(micro_batches, bind(sft_objective, totals))["loss"] == pytest.approx(expected, rel=1e-6)
    assert farthest(before, weights_of(engine, hf_model)) > 0


def test_a_model_keeps_its_dropout_where_it_is_asked_for(tmp_path):
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(tmp_path)
    model = load_causal_lm(ModelConfig(pretrain=str(tmp_path), param_dtype="fp32", keep_dropout=True))
    assert model.config._attn_implementation == "sdpa"  # varlen has no dropout
    policy, batch = PolicyModel(model).train(), pack(make_sequences(3))
    assert not torch.allclose(policy(batch)[0], policy(batch)[0])
    varlen = ModelConfig(pretrain=str(tmp_path), param_dtype="fp32", attn_implementation="varlen", keep_dropout=True)
    with pytest.raises(UsageError, match="'varlen' cannot be used here: the model needs attention dropout"):
        load_causal_lm(varlen)


@pytest.mark.parametrize("stage", STAGES)
def test_every_trainable_weight_moves_and_frozen_ones_do_not(tiny_llama_dir, items, stage):
    hf_model, module = load_policy(tiny_llama_dir, stage)
    frozen = {name for name, _ in hf_model.named_parameters() if ".layers.0." in name or "embed" in name}
    for name, parameter in hf_model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    engine = make_engine(module, stage)
    before = weights_of(engine, hf_model)
    train(engine, items, STEPS[:1], Layout())
    after = weights_of(engine, hf_model)
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    assert 0 < len(frozen) < len(before)


@pytest.mark.parametrize(("stage", "dtype", "optimizer"), WITH_MUON)
def test_a_loaded_engine_goes_on_bit_for_bit(tiny_model_dir, items, tmp_path, stage, dtype, optimizer):
    optim = OptimConfig(lr_warmup_ratio=0.3, max_norm=0.5, optim=optimizer)
    hf_model, module = load_policy(tiny_model_dir, stage, dtype=dtype)
    engine = make_engine(module, stage, dtype=dtype, optim=optim)
    seed_everything(5)
    train(engine, items, STEPS[:2], Layout(max_tokens=30))
    engine.save(tmp_path)
    assert file_bytes(tmp_path) <= engine.checkpoint_bytes() + 100_000 <= 2 * file_bytes(tmp_path) + 100_000
    metrics = train(engine, items, STEPS[2:] + STEPS[:1], Layout(max_tokens=30))
    drawn = (torch.rand(1).item(), np.random.rand())

    seed_everything(6)
    other_model, other = load_policy(tiny_model_dir, stage, dtype=dtype)
    resumed = make_engine(other, stage, dtype=dtype, optim=optim)
    resumed.load(tmp_path)
    assert train(resumed, items, STEPS[2:] + STEPS[:1], Layout(max_tokens=30)) == metrics
    assert (torch.rand(1).item(), np.random.rand()) == drawn
    expected, got = weights_of(engine, hf_model), weights_of(resumed, other_model)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_trains_at_every_stage_as_float32_does(tiny_model_dir, items, stage):
    losses = []
    for dtype, optimizer in TYPES:
        _, module = load_policy(tiny_model_dir, stage, dtype=dtype)
        optim = OPTIM.model_copy(update={"optim": optimizer})
        engine = make_engine(module, stage, dtype=dtype, learning_rate=1e-2, optim=optim)
        metrics = train(engine, items, [STEPS[0]] * 5, Layout(max_tokens=30))
        losses.append([step["loss"] for step in metrics])
    exact, *others = losses
    for found in others:
        assert found == pytest.approx(exact, rel=0.02)
        assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_rate_that_is_reported_is_the_one_that_was_used(stage, tiny_llama_dir, items):
    _, module = load_policy(tiny_llama_dir, stage)
    optim = OptimConfig(lr_warmup_ratio=0.2, max_norm=0.0)
    engine = make_engine(module, stage, optim=optim)
    name = "model.norm.weight"  # Adam's first step is the full learning rate for every weight
    before = weights_of(engine, module.model)[name]
    metrics = train(engine, items, STEPS[:1], Layout())
    moved = (weights_of(engine, module.model)[name] - before).abs()
    assert metrics[0]["lr"] == pytest.approx(0.5 * LEARNING_RATE)
    assert moved.max().item() == pytest.approx(0.5 * LEARNING_RATE, rel=1e-3)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_checkpointing_runs_layers_twice_and_takes_the_same_steps(tiny_model_dir, items, stage):
    results, calls = [], []
    for on in (False, True):
        hf_model, module = load_policy(tiny_model_dir, stage, gradient_checkpointing=on)
        runs: list[int] = []
        hf_model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        engine = make_engine(module, stage)
        metrics = train(engine, items, STEPS, Layout())
        results.append((metrics, weights_of(engine, hf_model)))
        calls.append(len(runs))
    assert calls == [3, 6]
    (plain, weights), (recomputed, same_weights) = results
    for one, other in zip(plain, recomputed, strict=True):  # the last bits may differ
        assert one == pytest.approx(other, rel=1e-6)
    assert farthest(weights, same_weights) < CLOSE


class Counter(nn.Module):
    """Its weight receives gradient 1 from every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.parametrize(
    ("stage", "dtype", "norm"), [(1, "fp32", 257), (2, "fp32", 257), (2, None, 257), (0, None, 256)]
)
def test_gradients_add_up_in_the_type_asked_for(stage, dtype, norm):
    """In bf16, which has 8 bits of precision, 256 + 1 is 256."""
    engine = make_engine(Counter(), stage, dtype="bf16", grad_accum_dtype=dtype)
    ones = [torch.ones(1, dtype=torch.bfloat16)] * 257
    metrics = engine.train_step(ones, lambda model, x: (model(x).sum(), {}))
    assert metrics["grad_norm"] == pytest.approx(norm, abs=0.01)


def test_float32_accumulation_at_stage_0_in_bf16_is_refused():
    with pytest.raises(UsageError, match="--grad_accum_dtype fp32 with bf16 weights requires --zero_stage 1"):
        make_engine(Counter(), 0, dtype="bf16", grad_accum_dtype="fp32")


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_is_the_global_mean_and_changes_nothing(tiny_model_dir, items, stage):
    hf_model, module = load_policy(tiny_model_dir, stage)
    engine = make_engine(module, stage)
    before = weights_of(engine, hf_model)
    packs, totals = Layout(max_tokens=20).share().micro_batches(items, np.arange(12))
    evaluated = engine.evaluate(packs, bind(sft_objective, totals))
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine, hf_model).items())
    trained = train(engine, items, [list(range(12))], Layout())
    assert evaluated["loss"] == pytest.approx(trained[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_have_the_names_and_shapes_that_hugging_face_loads(tiny_model_dir, stage):
    plain, _ = load_policy(tiny_model_dir, 0)
    expected = dict(plain.named_parameters())
    hf_model, module = load_policy(tiny_model_dir, stage)
    engine = make_engine(module, stage)
    for bucket_bytes in (1 << 28, 5000, 1):
        got = {name: weight.clone() for name, weight in engine.named_weights(hf_model, bucket_bytes=bucket_bytes)}
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_inference_engines_agree_with_the_plain_model(tiny_model_dir, items, stage):
    packs = [pack(items.sequences[:5]), pack([]), pack(items.sequences[5:])]
    _, plain = load_policy(tiny_model_dir, 0)
    with torch.no_grad():
        expected = [plain(batch, temperature=0.7)[0] for batch in packs]
    _, module = load_policy(tiny_model_dir, stage)
    frozen = FrozenEngine(module, DeepSpeedConfig(zero_stage=stage), param_dtype="fp32")
    _, module = load_policy(tiny_model_dir, stage)
    for engine in (frozen, make_engine(module, stage)):
        engine.sleep()
        engine.wake()
        results = engine.infer(packs, lambda model, batch: model(batch, temperature=0.7)[0])
        assert [len(result) for result in results] == [len(result) for result in expected]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results, expected, strict=True))
        assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("stage", STAGES)
def test_far_positions_are_told_apart_in_bf16_as_by_the_plain_model(tiny_llama_dir, stage):
    tokens = np.random.default_rng(2).integers(0, 40, 4000).astype(np.int32)
    packs = [pack([TokenSequence(tokens, np.arange(4000) >= 3900)])]
    hf_model, plain = load_policy(tiny_llama_dir, 0, dtype="bf16")
    expected = plain(packs[0])[0].detach()
    buffers = {name: buffer.clone() for name, buffer in hf_model.named_buffers()}
    frozen_model, module = load_policy(tiny_llama_dir, stage, dtype="bf16")
    frozen = FrozenEngine(module, DeepSpeedConfig(zero_stage=stage), param_dtype="bf16")
    trained_model, module = load_policy(tiny_llama_dir, stage, dtype="bf16")
    for model, engine in ((frozen_model, frozen), (trained_model, make_engine(module, stage, dtype="bf16"))):
        assert {str(buffer.dtype) for buffer in buffers.values()} == {"torch.float32"}
        assert all(buffer.equal(buffers[name]) for name, buffer in model.named_buffers())
        assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
        (result,) = engine.infer(packs, lambda model, batch: model(batch)[0])
        assert torch.allclose(result, expected, atol=1e-5)


def test_an_idle_micro_batch_changes_nothing(tiny_model_dir, items):
    results = []
    for idle in (0, 2):
        hf_model, module = load_policy(tiny_model_dir, 2)
        engine = make_engine(module, 2)
        packs, totals = Layout().share().micro_batches(items, np.arange(3))
        metrics = engine.train_step([*packs, *[pack([])] * idle], bind(sft_objective, totals))
        results.append((metrics, weights_of(engine, hf_model)))
    assert results[0][0] == results[1][0]
    assert farthest(results[0][1], results[1][1]) == 0


def test_a_sequence_longer_than_the_token_bound_is_named(items):
    long = TokenSequence(np.zeros(40, np.int32), np.arange(40) > 0)
    with pytest.raises(UsageError, match="40 tokens does not fit into a micro-batch of 30"):
        Layout(max_tokens=30).share().micro_batches(Items([long]), np.arange(1))


def test_seven_sequences_on_eight_ranks_are_each_trained_once(items):
    shares = [Layout(rank, 8).share().micro_batches(items, np.arange(7)) for rank in range(8)]
    assert {len(packs) for packs, _ in shares} == {1}
    assert sorted(packs[0].num_sequences for packs, _ in shares) == [0, 1, 1, 1, 1, 1, 1, 1]
    assert len({totals for _, totals in shares}) == 1
    assert sum(packs[0].targets_K.numel() for packs, _ in shares) == shares[0][1].num_tokens


@pytest.mark.e2e
@pytest.mark.timeout(900)  # compiles DeepSpeed's optimizer on first use: a minute on two idle cores
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_in_host_memory_takes_the_same_steps(tiny_model_dir, items, stage, dtype):
    results = []
    for offload in (False, True):
        hf_model, module = load_policy(tiny_model_dir, stage, dtype=dtype)
        engine = make_engine(module, stage, dtype=dtype, adam_offload=offload)
        metrics = train(engine, items, STEPS, Layout())
        results.append((metrics, weights_of(engine, hf_model)))
    (plain, weights), (offloaded, same_weights) = results
    for one, other in zip(plain, offloaded, strict=True):
        assert one == pytest.approx(other, rel=1e-4 if dtype == "fp32" else 1e-2)
    assert farthest(weights, same_weights) < (CLOSE if dtype == "fp32" else 1e-2)


def test_an_optimizer_in_host_memory_at_stage_0_is_refused():
    with pytest.raises(UsageError, match=r"--adam_offload requires --zero_stage 1 or higher"):
        make_engine(Scale(), 0, adam_offload=True)
