"""Adapters on one base model: gradients equal to a plain computation, AdamW, separate states, save and load."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_cli.algorithms.tinker_losses import LOSSES
from rlhf_cli.backends.training.adapter_trainer import (
    AdamStep,
    AdapterShape,
    AdapterTrainer,
    AdapterWeights,
    Datum,
    target_pack,
)
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError

STEP = AdamStep(1e-2, 0.9, 0.95, 1e-8)
CROSS_ENTROPY = LOSSES["cross_entropy"]


@pytest.fixture(scope="module")
def trainer(tiny_llama_dir) -> AdapterTrainer:
    return AdapterTrainer(ModelConfig(pretrain=tiny_llama_dir, param_dtype="fp32"), max_tokens=24)


def datum(length: int, *, seed: int = 0) -> Datum:
    """Return a datum whose first half has no weight."""
    tokens = np.random.default_rng(seed).integers(3, 250, length + 1).astype(np.int32)
    weights = (np.arange(length) >= length // 2).astype(np.float32)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64), "weights": weights})


DATA = [datum(5), datum(20, seed=1), datum(9, seed=2)]


def backward(trainer: AdapterTrainer, adapter, data=DATA, loss=CROSS_ENTROPY, config=None):
    return trainer.forward_backward(adapter, data, loss, config or {}, backward=True)


def gradients(adapter) -> dict[str, torch.Tensor]:
    return {name: factor.grad.clone() for name, factor in adapter.factors.items() if factor.grad is not None}


def trained(trainer: AdapterTrainer, shape: AdapterShape, steps: int = 2):
    adapter = trainer.new_adapter(shape)
    for _ in range(steps):
        backward(trainer, adapter)
        trainer.optim_step(adapter, STEP)
    return adapter


def copied_states(adapter) -> dict:
    return copy.deepcopy(adapter.optimizer.state_dict())


def plain_logprobs(model, one: Datum) -> torch.Tensor:
    logits = model(torch.tensor(one.token_ids[None]).long()).logits[0].log_softmax(-1)
    return logits.gather(-1, torch.tensor(one.inputs["target_tokens"])[:, None])[:, 0]


def test_a_new_adapter_changes_nothing(trainer, tiny_llama_dir):
    adapter = trainer.new_adapter(AdapterShape(4, 32))
    found, total = trainer.forward_backward(adapter, DATA, CROSS_ENTROPY, {}, backward=False)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    with torch.no_grad():
        expected = [plain_logprobs(plain, one) for one in DATA]
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
    weighted = [(row * torch.tensor(one.inputs["weights"])).sum() for row, one in zip(expected, DATA, strict=True)]
    assert total == pytest.approx(-float(sum(weighted)), rel=1e-5)
    assert not gradients(adapter)


def test_the_merged_weights_compute_what_the_adapter_computes(trainer, tiny_llama_dir):
    adapter = trained(trainer, AdapterShape(4, 32, seed=3))
    found, _ = trainer.forward_backward(adapter, DATA, CROSS_ENTROPY, {}, backward=False)
    weights = AdapterWeights(32, {name: factor.clone() for name, factor in trainer.factors_of(adapter).items()})
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    plain.load_state_dict(dict(trainer.engine_weights(weights)))
    with torch.no_grad():
        np.testing.assert_allclose(found[1], plain_logprobs(plain, DATA[1]), atol=1e-5)
    whole = np.concatenate([DATA[1].token_ids, DATA[1].inputs["target_tokens"][-1:].astype(np.int32)])
    np.testing.assert_allclose(trainer.score(weights, whole), found[1], atol=1e-5)
    base, _ = trainer.forward_backward(
        trainer.new_adapter(AdapterShape(1, 32)), DATA, CROSS_ENTROPY, {}, backward=False
    )
    np.testing.assert_allclose(trainer.score(AdapterWeights(), whole), base[1], atol=1e-5)
    assert np.abs(base[1] - found[1]).max() > 0.1


def test_gradients_of_several_requests_add_up_to_those_of_one(trainer):
    shape = AdapterShape(4, 32, seed=5)
    together, apart = trained(trainer, shape), trained(trainer, shape)
    _, total = backward(trainer, together)
    parts = [backward(trainer, apart, [one])[1] for one in DATA]
    assert sum(parts) == pytest.approx(total, rel=1e-6)
    for name, gradient in gradients(together).items():
        torch.testing.assert_close(gradients(apart)[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_request_that_fails_adds_no_part_of_its_gradient(trainer, monkeypatch):
    adapter = trained(trainer, AdapterShape(2, 16))
    backward(trainer, adapter, DATA[:1])
    before = gradients(adapter)
    policy, calls = trainer._policy.forward, []

    def forward(*inputs, **options):
        calls.append(inputs)
        if len(calls) == 2:
            raise RuntimeError("CUDA out of memory")
        return policy(*inputs, **options)

    monkeypatch.setattr(trainer._policy, "forward", forward)
    with pytest.raises(RuntimeError):
        backward(trainer, adapter)
    after = gradients(adapter)
    assert len(calls) == 2
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


def test_a_step_is_that_of_adamw(trainer):
    adapter = trained(trainer, AdapterShape(2, 16, seed=1), steps=1)
    start = {name: factor.detach().clone().requires_grad_() for name, factor in adapter.factors.items()}
    plain = torch.optim.AdamW(start.values(), lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    # The same moments as after the first step.
    plain.load_state_dict({**plain.state_dict(), "state": copied_states(adapter)["state"]})
    backward(trainer, adapter)
    found = gradients(adapter)
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    for name, factor in start.items():
        factor.grad = found[name] * 0.5 / norm
    metrics = trainer.optim_step(adapter, AdamStep(3e-3, 0.8, 0.9, 1e-6, weight_decay=0.1, grad_clip_norm=0.5))
    plain.step()
    assert metrics == {"grad_norm": pytest.approx(float(norm)), "skipped": 0.0}
    for name, factor in adapter.factors.items():
        torch.testing.assert_close(factor.detach(), start[name].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("broken", [None, float("nan")])
def test_a_step_without_a_finite_gradient_changes_nothing(trainer, broken):
    adapter = trained(trainer, AdapterShape(2, 16))
    before = [factor.detach().clone() for factor in adapter.factors.values()]
    if broken is not None:
        backward(trainer, adapter)
        adapter.trained[0].grad[0, 0] = broken
    assert trainer.optim_step(adapter, STEP)["skipped"] == 1
    assert all(torch.equal(factor, old) for factor, old in zip(adapter.factors.values(), before, strict=True))
    assert not gradients(adapter)


def test_adapters_of_different_ranks_train_side_by_side(trainer):
    alone = [trained(trainer, AdapterShape(rank, 32, seed=rank)) for rank in (1, 6)]
    both = [trainer.new_adapter(AdapterShape(rank, 32, seed=rank)) for rank in (1, 6)]
    for _ in range(2):
        for adapter in both:
            backward(trainer, adapter)
        for adapter in both:
            trainer.optim_step(adapter, STEP)
    for one, other in zip(alone, both, strict=True):
        assert all(torch.equal(one.factors[name], other.factors[name]) for name in one.factors)


def test_only_the_chosen_layers_are_trained(trainer):
    adapter = trained(trainer, AdapterShape(2, 16, train_mlp=False))
    changed = {name for name, factor in adapter.factors.items() if "lora_B" in name and factor.any()}
    assert changed
    assert all("self_attn" in name for name in changed)
    with pytest.raises(UsageError, match="train_attn and train_mlp select no layer"):
        trainer.new_adapter(AdapterShape(2, 16, train_attn=False, train_mlp=False))


def test_a_rank_above_that_of_all_layers_is_refused(trainer):
    with pytest.raises(UsageError, match=r"rank 100000 is above \d+, the highest rank of a layer in this model"):
        trainer.new_adapter(AdapterShape(100_000, 16))


def test_several_targets_at_a_position_and_targets_that_do_not_follow(trainer):
    tokens = np.array([5, 6, 7], np.int32)
    wide = Datum(tokens, {"target_tokens": np.array([[9, 10], [11, 12], [13, 14]])})
    columns = [
        Datum(tokens, {"target_tokens": np.ascontiguousarray(wide.inputs["target_tokens"][:, k])}) for k in (0, 1)
    ]
    assert target_pack([wide]).rows_K.tolist() == [0, 0, 1, 1, 2, 2]
    data = [
        Datum(one.token_ids, {**one.inputs, "weights": np.ones_like(one.inputs["target_tokens"], np.float32)})
        for one in (wide, *columns)
    ]
    adapter = trained(trainer, AdapterShape(2, 16))
    (both, first, second), _ = trainer.forward_backward(adapter, data, CROSS_ENTROPY, {}, backward=False)
    np.testing.assert_allclose(both, np.stack([first, second], -1), atol=1e-5)


def test_a_loaded_adapter_continues_exactly(trainer):
    adapter = trained(trainer, AdapterShape(4, 32, seed=7), steps=3)
    factors = {name: factor.clone() for name, factor in trainer.factors_of(adapter).items()}
    states = copied_states(adapter)
    copies = [trainer.new_adapter(AdapterShape(4, 32, seed=8)) for _ in range(2)]
    trainer.load(copies[0], factors, states)
    trainer.load(copies[1], factors, None)
    for each in (adapter, *copies):
        backward(trainer, each)
        trainer.optim_step(each, STEP)
    same = [torch.equal(adapter.factors[name], copies[0].factors[name]) for name in adapter.factors]
    assert all(same)
    assert not all(torch.equal(adapter.factors[name], copies[1].factors[name]) for name in adapter.factors)


def test_an_adapter_of_another_rank_is_refused(trainer):
    adapter = trainer.new_adapter(AdapterShape(4, 32))
    other = trainer.factors_of(trainer.new_adapter(AdapterShape(2, 32)))
    with pytest.raises(UsageError, match="the checkpoint does not match the model: check base_model"):
        trainer.load(adapter, other, None)
