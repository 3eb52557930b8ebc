"""One of several ranks, of which some share the tokens of packs: `python shared_sequences.py MODEL TEACHER OUT SIZE`.

SIZE ranks share a sequence. Every rank computes each pack alone too, and writes how far the shared results are from its
own, and then the metrics and weights of three steps at each ZeRO stage.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from distill_training import distill_steps
from preference_training import TASKS, run_steps
from tiny_training import Items, Layout, load_policy, make_engine, make_sequences, train, weights_of
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.data.packing.prefix_packing import Branch, Tree, pack_trees
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.models.sequence_parallel.shards import Mode, SequenceRanks

SHAPES = {"grouped": (6, 3, None), "one key head": (6, 1, None), "a window": (6, 6, 4)}
"""Query heads, key heads, and the tokens that a position sees; heads divide by two and by three ranks."""


def sequence(*token_ids: int) -> TokenSequence:
    """Tokens of which all but the first are trained."""
    return TokenSequence(np.array(token_ids, np.int32), np.arange(len(token_ids)) > 0)


def packs() -> dict[str, Pack]:
    responses = [np.array(ids, np.int32) for ids in ([7, 8], [9, 10, 11], [12])]
    tree = Tree(np.array([1, 2, 3], np.int32), tuple(Branch(ids, np.ones(len(ids), bool)) for ids in responses))
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
        hidden_size=48,
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


def results_of(
    module: nn.Module, one: Pack, ranks: SequenceRanks | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the module's results on a pack, and the gradients of a sum in which each result has another weight."""
    module.zero_grad()
    module.sequence_ranks = ranks
    if isinstance(module, PolicyModel):
        logprobs, entropies = module(one, with_entropy=True)
        assert entropies is not None
        found = torch.stack([logprobs, entropies])
    else:
        found = module(one)[None]
    (found * torch.arange(1, 1 + found.numel()).view_as(found)).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    if ranks is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=ranks.group)
    return found.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    largest = max(float(gradient.abs().max()) for gradient in one.values()) or 1.0
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


def distances(group: dist.ProcessGroup) -> dict[str, tuple[float, float]]:
    """Return how far results and gradients of the group are from those of a rank alone."""
    found = {}
    for shape_name, shape in SHAPES.items():
        for kind in ("policy", "value", "checkpointed"):
            torch.manual_seed(0)
            model = (Qwen2ForSequenceClassification if kind == "value" else Qwen2ForCausalLM)(config(shape)).train()
            if kind == "checkpointed":
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            module = (ValueModel if kind == "value" else PolicyModel)(model)
            for pack_name, one in packs().items():
                expected, expected_gradients = results_of(module, one, None)
                for mode in get_args(Mode):
                    if mode == "ring" and one.keys is not None:
                        continue  # its kernel takes keys in their order alone
                    got, gradients = results_of(module, one, SequenceRanks(group, mode))
                    assert got.shape == expected.shape
                    distance = float((got - expected).abs().max()) if got.numel() else 0.0
                    place = f"{mode}, {shape_name}, {kind}, {pack_name}"
                    found[place] = distance, farthest(expected_gradients, gradients)
    return found


def steps(model: str, stage: int, size: int) -> dict[str, object]:
    """Return the metrics and weights of three steps; 30 tokens are the most of any number of ranks."""
    hf_model, module = load_policy(model, stage)
    settings = DeepSpeedConfig(zero_stage=stage, sequence_parallel_size=size)
    module.sequence_ranks = sequence_ranks(settings, hf_model.config)
    engine = make_engine(module, stage, sequence_parallel_size=size)
    layout = Layout(dist.get_rank(), dist.get_world_size(), max_tokens=30 // size, ranks_per_sequence=size)
    items = Items(make_sequences(10))
    metrics = train(engine, items, [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9]], layout)
    return {"metrics": metrics, "weights": weights_of(engine, hf_model)}


def main(model: str, teacher: str, folder: Path, size: int) -> None:
    sys.path.append(str(Path(__file__).with_name("flash_attn_stand_in")))
    distributed.join_process_group()
    group = distributed.sequence_group(size)
    results: dict[str, object] = {} if group is None else {"distances": distances(group)}
    if dist.get_world_size() != 3:  # the model has four heads
        results |= {f"steps {stage}": steps(model, stage, size) for stage in range(4)}
        layout = Layout(dist.get_rank(), dist.get_world_size(), max_tokens=80 // size, ranks_per_sequence=size)
        for name in TASKS:
            trained = run_steps(model, TASKS[name](), 2, layout)
            results[name] = {"metrics": trained.metrics, "weights": trained.weights}
        layout = replace(layout, max_tokens=30 // size)
        trained = distill_steps(model, teacher, 2, layout, teacher_stage=3)
        results["distill"] = {"metrics": trained.metrics, "weights": trained.weights}
    torch.save(results, folder / f"rank{dist.get_rank()}of{dist.get_world_size()}.pt")
    distributed.leave_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
