"""A step that runs out of memory starts again with smaller micro-batches, as if it had begun with them."""

import numpy as np
import pytest
import torch
from tiny_training import Items, Layout, load_policy, make_engine, make_sequences, weights_of

from rlhf_cli.errors import OutOfMemory
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
