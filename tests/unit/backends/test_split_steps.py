"""A step that runs out of memory starts again with smaller micro-batches, as if it had begun with them."""

import numpy as np
import pytest
import torch
from adapted_models import load
from tiny_training import CLOSE, OPTIM, Items, Layout, farthest, load_policy, make_engine, make_sequences, weights_of

from rlhf_cli.config.train import OptimConfig
from rlhf_cli.errors import OutOfMemory
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.trainers.offline.loop import bind
from rlhf_cli.trainers.offline.sft import sft_objective

pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "fp32"), (2, "bf16")])
def test_a_split_step_equals_one_that_was_small_from_the_start(tiny_model_dir, stage, dtype, where):
    items, indices, share = Items(make_sequences(12)), np.arange(12), Layout(max_tokens=50).share()
    found = []
    for fails in (True, False):
        hf_model, module = load_policy(tiny_model_dir, stage, dtype=dtype)
        engine = make_engine(module, stage, dtype=dtype)
        packs, totals = share.micro_batches(items, indices)
        limit = packs[1].input_ids_T.numel() // 2

        def smaller(max_tokens):
            return share.micro_batches(items, indices, max_tokens)[0]

        def loss(model, pack, large=packs[1].input_ids_T, totals=totals, module=hf_model):
            value, metrics = sft_objective(model, pack, totals)
            if pack.input_ids_T.equal(large):
                if where == "forward":
                    raise torch.OutOfMemoryError("CUDA out of memory")
                middle = list(module.parameters())[len(list(module.parameters())) // 2]

                def stop(grad):
                    hook.remove()
                    raise torch.OutOfMemoryError("CUDA out of memory")

                hook = middle.register_hook(stop)
            return value, metrics

        if fails:
            first = engine.train_step(packs, loss, smaller=smaller)
            assert first["perf/pack_tokens_max"] == engine.token_limit == limit
        else:
            first = engine.train_step(smaller(limit), bind(sft_objective, totals))
        second = engine.train_step(smaller(limit), bind(sft_objective, totals))
        found.append((first["loss"], first["grad_norm"], second["loss"], weights_of(engine, hf_model)))
    assert found[0][:3] == found[1][:3]
    assert all(torch.equal(found[0][3][name], weight) for name, weight in found[1][3].items())


def test_a_micro_batch_of_one_sequence_is_not_split(tiny_model_dir):
    items, share = Items(make_sequences(2)), Layout(max_sequences=1).share()
    _, module = load_policy(tiny_model_dir, 2)
    packs, _ = share.micro_batches(items, np.arange(2))

    def fail(model, pack):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemory):
        make_engine(module, 2).train_step(
            packs, fail, smaller=lambda limit: share.micro_batches(items, np.arange(2), limit)[0]
        )


def begun(tiny_model_dir, *, adapter=None, optim=OPTIM, stage=2, dtype="fp32", **zero):
    """Return a model and its engine, with the random numbers of a new process."""
    torch.manual_seed(0)
    if adapter is None:
        hf_model, module = load_policy(tiny_model_dir, stage, dtype=dtype)
    else:
        hf_model = load(tiny_model_dir, stage, dtype=dtype, **adapter)
        module = PolicyModel(hf_model)
    return hf_model, make_engine(module, stage, optim=optim, dtype=dtype, **zero)


def stopped_in(pack, totals):
    """Return sft's loss that runs out of memory after the forward pass of this micro-batch."""

    def loss(model, micro_batch):
        value, metrics = sft_objective(model, micro_batch, totals)
        if micro_batch.input_ids_T.equal(pack.input_ids_T):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return value, metrics

    return loss


def split_step(engine, items, share, indices):
    """Take a step that stops in its second micro-batch; return its metrics and the limit."""
    packs, totals = share.micro_batches(items, indices)
    smaller = lambda limit: share.micro_batches(items, indices, limit)[0]  # noqa: E731
    return engine.train_step(packs, stopped_in(packs[1], totals), smaller=smaller), packs[1].input_ids_T.numel() // 2


def plain_step(engine, items, share, indices, limit=None):
    packs, totals = share.micro_batches(items, indices, limit)
    return engine.train_step(packs, bind(sft_objective, totals))


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter": {"lora_dropout": 0.0}},
        # Random numbers depend on the micro-batches, so the step equals one with the lower limit, not the whole one.
        {"adapter": {"lora_dropout": 0.5}},
        {"optim": OptimConfig(optim="muon", lr_scheduler="constant", max_norm=0.5), "dtype": "bf16"},
        {"optim": OptimConfig(optim="adamw_bf16", lr_scheduler="constant", max_norm=0.5), "dtype": "bf16"},
        pytest.param({"adam_offload": True}, marks=pytest.mark.e2e),  # compiles DeepSpeed's optimizer on first use
        pytest.param({"adam_offload": True, "dtype": "bf16", "stage": 1}, marks=pytest.mark.e2e),
    ],
)
def test_a_split_step_equals_a_small_one_with_each_optimizer_and_adapter(tiny_model_dir, settings):
    items, indices, share = Items(make_sequences(12)), np.arange(12), Layout(max_tokens=50).share()
    found = []
    for fails in (True, False):
        hf_model, engine = begun(tiny_model_dir, **settings)
        plain_step(engine, items, share, indices, 50)
        if fails:
            first, limit = split_step(engine, items, share, indices)
        else:
            first = plain_step(engine, items, share, indices, limit)
        second = plain_step(engine, items, share, indices, limit)
        found.append((first["loss"], first["grad_norm"], second["loss"], weights_of(engine, hf_model)))
    assert found[0][:3] == found[1][:3]
    assert all(torch.equal(found[0][3][name], weight) for name, weight in found[1][3].items())


def test_a_split_step_is_the_update_of_the_whole_step(tiny_model_dir):
    items, indices, share = Items(make_sequences(12)), np.arange(12), Layout(max_tokens=50).share()
    found = []
    for take in (split_step, plain_step):
        hf_model, engine = begun(tiny_model_dir)
        take(engine, items, share, indices)
        found.append(weights_of(engine, hf_model))
    assert farthest(*found) < CLOSE


def test_a_resumed_run_keeps_the_lower_limit(tiny_model_dir, tmp_path):
    items, indices, share = Items(make_sequences(12)), np.arange(12), Layout(max_tokens=50).share()
    _, engine = begun(tiny_model_dir)
    _, limit = split_step(engine, items, share, indices)
    engine.save(tmp_path)
    _, resumed = begun(tiny_model_dir)
    assert resumed.token_limit is None
    resumed.load(tmp_path)
    assert resumed.token_limit == limit
    whole, parts = (share.micro_batches(items, indices, at)[0] for at in (None, resumed.token_limit))
    assert len(parts) > len(whole)
