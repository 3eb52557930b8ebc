"""One of several ranks with sequence parallelism, started by `start_ranks`.

Each rank also computes each pack by itself, and writes the distance between shared and own
results; ranks of two groups do the same as one group. Then follow metrics and weights of steps. Finally, the
ranks split layers instead, also for the model in `normed`.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from distill_training import distill_steps
from preference_training import TASKS, make_pairs, make_reference, run_steps
from shared_roles import online_roles
from split_layers import split_layers
from tiny_training import Items, Layout, load_policy, make_engine, make_sequences, train, weights_of
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.distributed import gather_rows
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.data.packing.prefix_packing import Continuation, Tree, pack_trees
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.models.sequence_parallel.shards import Mode, SequenceRanks
from rlhf_cli.trainers.offline import dpo
from rlhf_cli.trainers.offline.loop import bind
from rlhf_cli.trainers.offline.pairs import PairItems
from rlhf_cli.trainers.offline.reference_logprobs import all_results
from rlhf_cli.trainers.offline.sft import sft_objective

RANKS_TOGETHER = {1: 1, 3: 3, 4: 2}
"""Ranks that share a sequence, by number of ranks; four ranks form two groups with different data."""
SHAPES = {
    "3 key heads": (12, 3, None),
    "4 key heads": (12, 4, None),
    "one key head": (12, 1, None),
    "a window": (12, 12, 4),
    "5 heads": (5, 5, None),
}
"""Query heads, key heads, and attention window. Each of 2, 3 and 4 ranks divides the key heads of some shape, is a
multiple of others, and is neither for others; none divides five heads.
"""
KINDS = {"value": "3 key heads", "checkpointed": "a window", "sinks": "4 key heads"}
"""Models in addition to the policy, which uses all shapes."""
IN_BF16 = ("3 key heads", "a window")


def sequence(*token_ids: int) -> TokenSequence:
    """Return tokens with all but the first trained."""
    return TokenSequence(np.array(token_ids, np.int32), np.arange(len(token_ids)) > 0)


def packs() -> dict[str, Pack]:
    responses = [np.array(ids, np.int32) for ids in ([7, 8], [9, 10, 11], [12])]
    tree = Tree(np.array([1, 2, 3], np.int32), tuple(Continuation(ids, np.ones(len(ids), bool)) for ids in responses))
    return {
        "several": pack(make_sequences(5)),
        "one long": pack(make_sequences(1, seed=3)),
        "two tokens": pack([sequence(5, 6)]),
        "no target": pack([sequence(5)]),
        "idle": pack([]),
        "a shared prompt": pack_trees([tree], share_prompts=True),
    }


def config(shape: tuple[int, int, int | None]) -> Qwen2Config:
    heads, key_heads, window = shape
    return Qwen2Config(
        vocab_size=40,
        hidden_size=8 * heads,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        initializer_range=0.2,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
        num_labels=1,
        pad_token_id=0,
        attn_implementation="varlen",
    )


def config_with_sinks(shape: tuple[int, int, int | None]) -> GptOssConfig:
    """Return a mixture with a window of four tokens in its first layer and attention sinks in both."""
    heads, key_heads, _ = shape
    return GptOssConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        initializer_range=0.2,
        sliding_window=4,
        pad_token_id=0,
        attn_implementation="varlen",
    )


Results = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Module outputs for a pack, and gradients, in float32."""


def results_of(module: nn.Module, one: Pack, ranks: SequenceRanks | None) -> Results:
    """Return module outputs on a pack, and gradients of a sum with different weights per output."""
    module.zero_grad()
    module.sequence_ranks = ranks
    if isinstance(module, PolicyModel):
        logprobs, entropies = module(one, with_entropy=True)
        assert entropies is not None
        found = torch.stack([logprobs, entropies])
    else:
        found = module(one)[None]
    (found * torch.arange(1, 1 + found.numel()).view_as(found)).sum().backward()
    gradients = {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}
    if ranks is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=ranks.group)
    return found.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    largest = max(float(gradient.abs().max()) for gradient in one.values()) or 1.0
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


def make_module(kind: str, shape: tuple[int, int, int | None], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    classes = {"value": Qwen2ForSequenceClassification, "sinks": GptOssForCausalLM}
    shaped = config_with_sinks(shape) if kind == "sinks" else config(shape)
    model = classes.get(kind, Qwen2ForCausalLM)(shaped).train()
    model = model.to(torch.bfloat16).to(dtype)  # the same values in both dtypes
    if kind == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return (ValueModel if kind == "value" else PolicyModel)(model)


def ways(
    shape: tuple[int, int, int | None], one: Pack, group: dist.ProcessGroup, kind: str = "policy"
) -> list[SequenceRanks]:
    """Return the ways in which the group can share the pack."""
    modes = set(get_args(Mode))
    if shape[0] % dist.get_world_size(group):
        modes.remove("ulysses")
    if one.keys is not None or kind == "sinks":
        modes.remove("ring")  # its kernel requires keys in order, and has no sinks
    return [SequenceRanks(group, mode) for mode in sorted(modes)]


def distances(group: dist.ProcessGroup) -> dict[str, tuple[float, float]]:
    """Return the distances between group and single-rank outputs and gradients."""
    found = {}
    chosen = [("policy", name) for name in SHAPES] + list(KINDS.items())
    for kind, shape_name in chosen:
        module = make_module(kind, SHAPES[shape_name])
        for pack_name, one in packs().items():
            expected = results_of(module, one, None)
            for ranks in ways(SHAPES[shape_name], one, group, kind):
                place = f"{ranks.mode}, {shape_name}, {kind}, {pack_name}, {ranks.size} ranks"
                found[place] = apart(expected, results_of(module, one, ranks))
    return found


def errors_in_bf16(group: dist.ProcessGroup) -> dict[str, tuple[tuple[float, float], tuple[float, float]]]:
    """Return bf16 errors relative to float32, for a single rank and for the group."""
    found = {}
    for shape_name in IN_BF16:
        exact, rounded = (make_module("policy", SHAPES[shape_name], dtype) for dtype in (torch.float32, torch.bfloat16))
        for pack_name, one in packs().items():
            expected = results_of(exact, one, None)
            alone = apart(expected, results_of(rounded, one, None))
            for ranks in ways(SHAPES[shape_name], one, group):
                shared = apart(expected, results_of(rounded, one, ranks))
                found[f"{ranks.mode}, {shape_name}, {pack_name}, {ranks.size} ranks"] = alone, shared
    return found


def apart(one: Results, other: Results) -> tuple[float, float]:
    """Return the maximum distance of outputs, and of gradients relative to the largest gradient."""
    assert one[0].shape == other[0].shape
    return float((one[0] - other[0]).abs().max()) if one[0].numel() else 0.0, farthest(one[1], other[1])


def steps(model: str, stage: int, size: int, dtype: str) -> dict[str, object]:
    """Return metrics and weights of three steps; 30 tokens is the maximum of any number of ranks."""
    hf_model, module = load_policy(model, stage, dtype=dtype)
    settings = DeepSpeedConfig(zero_stage=stage, sequence_parallel_size=size)  # type: ignore[arg-type]
    module.sequence_ranks = sequence_ranks(settings, hf_model.config)
    engine = make_engine(module, stage, dtype=dtype, sequence_parallel_size=size)
    layout = Layout(dist.get_rank(), dist.get_world_size(), max_tokens=30 // size, ranks_per_sequence=size)
    items = Items(make_sequences(10))
    metrics = train(engine, items, [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9]], layout)
    micro_batches, totals = layout.share().micro_batches(items, np.arange(10))
    metrics.append(engine.evaluate(micro_batches, bind(sft_objective, totals)))
    return {"metrics": metrics, "weights": weights_of(engine, hf_model)}


def precomputed(model: str, layout: Layout) -> torch.Tensor:
    """Return reference log-probs for all pairs."""
    gather = partial(gather_rows, ranks_per_pack=layout.ranks_per_sequence)
    reference = make_reference(model, 0, 5, size=layout.ranks_per_sequence)
    pairs = PairItems(make_pairs(), True, False, {})
    return torch.from_numpy(all_results(reference, dpo.batch_logprobs, pairs, share=layout.share(), gather=gather))


def training(model: str, teacher: str, judge: str, normed: str, folder: Path, size: int) -> dict[str, object]:
    """Return results of steps, objectives and roles. Four ranks train as two groups."""
    world = dist.get_world_size()
    results: dict[str, object] = {f"steps {stage} fp32": steps(model, stage, size, "fp32") for stage in range(4)}
    if world == 3:  # the model has four heads, so three ranks gather keys
        return results
    results |= {f"steps {stage} bf16": steps(model, stage, size, "bf16") for stage in range(4)}
    results["steps as one group"] = steps(model, 3, world, "fp32")
    layout = Layout(dist.get_rank(), world, max_tokens=80 // size, ranks_per_sequence=size)
    for name in TASKS:
        trained = run_steps(model, TASKS[name](), 2, layout)
        results[name] = {"metrics": trained.metrics, "weights": trained.weights}
    results["precomputed"] = precomputed(model, layout)
    trained = distill_steps(model, teacher, 2, replace(layout, max_tokens=30 // size), teacher_stage=3)
    results["distill"] = {"metrics": trained.metrics, "weights": trained.weights}
    results |= online_roles(model, judge, size, folder)
    return results | split_layers(model, normed, teacher, folder, size)


def main(model: str, teacher: str, judge: str, normed: str, out: str) -> None:
    folder = Path(out)
    sys.path.append(str(Path(__file__).with_name("flash_attn_stand_in")))
    distributed.join_process_group()
    size = RANKS_TOGETHER[dist.get_world_size()]
    sizes = sorted({size, dist.get_world_size()})
    groups = [group for group in map(distributed.sequence_group, sizes) if group is not None]
    results: dict[str, object] = {
        "distances": {place: found for group in groups for place, found in distances(group).items()},
        "bf16": {place: found for group in groups for place, found in errors_in_bf16(group).items()},
    }
    results |= training(model, teacher, judge, normed, folder, size)
    torch.save(results, folder / f"rank{dist.get_rank()}of{dist.get_world_size()}.pt")
    distributed.leave_process_group()
