"""Tensor parallelism: steps, objectives, roles, and checkpoints.

Trains two models, one of them with head norms.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from distill_training import distill_steps
from preference_training import TASKS, run_steps
from shared_roles import GSPO, actor, critic
from tiny_training import Items, Layout, load_policy, make_engine, make_sequences, train, weights_of

from rlhf_cli.backends.training.deepspeed_weights import EngineWeights
from rlhf_cli.backends.training.random_states import seed_everything

STEPS = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9]]
"""In the last step, one of two rank groups is idle."""
STAGES = (1, 2, 3)
OBJECTIVES = ("dpo", "rm")


def layout(size: int, max_tokens: int) -> Layout:
    return Layout(dist.get_rank(), dist.get_world_size(), max_tokens=max_tokens, ranks_per_layer=size)


def steps(model: str, stage: int, size: int, *, checkpointing: bool = False, **options: Any) -> dict[str, Any]:
    """Run three float32 steps."""
    hf_model, module = load_policy(model, stage, gradient_checkpointing=checkpointing)
    engine = make_engine(module, stage, tensor_parallel_size=size, **options)
    metrics = train(engine, Items(make_sequences(10)), STEPS, layout(size, 30))
    return {"metrics": metrics, "weights": weights_of(engine, hf_model), "bytes": engine.checkpoint_bytes()}


def resumed(model: str, stage: int, size: int, dtype: str, folder: Path) -> dict[str, Any]:
    """Return whether a saved and reloaded engine continues identically, and the checkpoint's contents."""
    items, results = Items(make_sequences(10)), []
    for is_first in (True, False):
        seed_everything(1 if is_first else 99)
        hf_model, module = load_policy(model, stage, dtype=dtype)
        engine = make_engine(module, stage, dtype=dtype, tensor_parallel_size=size)
        if is_first:
            train(engine, items, STEPS[:2], layout(size, 30))
            engine.save(folder)
            saved = weights_of(engine, hf_model)
        else:
            engine.load(folder)
        metrics = train(engine, items, STEPS[2:] + STEPS[:1], layout(size, 30))
        results.append((metrics, weights_of(engine, hf_model)))
    (metrics, weights), (again, same_weights) = results
    read = EngineWeights(folder, getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]))
    kept = {name: read.read(name) for name in read.names()}
    return {
        "metrics": metrics == again,
        "weights": all(torch.equal(weights[name], same_weights[name]) for name in weights),
        "merged": all(torch.equal(kept[name], weight) for name, weight in saved.items()),
        "shapes": all(read.shape(name) == tuple(weight.shape) for name, weight in saved.items()),
    }


def anew(results: dict[str, Any]) -> dict[str, Any]:
    """Return results, and reset DeepSpeed's groups for the next engine, as in a new process."""
    groups.mpu = None
    return results


def split_layers(model: str, normed: str, teacher: str, folder: Path, size: int) -> dict[str, Any]:
    """Return results of steps, objectives and roles with tensor parallelism; `size` ranks form a group."""
    results = {f"split {stage}": anew(steps(normed, stage, size, checkpointing=True)) for stage in STAGES}
    results["split and offloaded"] = anew(steps(normed, 3, size, adam_offload=True, param_offload=True))
    for name in OBJECTIVES:
        trained = run_steps(model, TASKS[name](), 2, layout(size, 80))
        results[f"split {name}"] = anew({"metrics": trained.metrics, "weights": trained.weights})
    trained = distill_steps(model, teacher, 3, layout(size, 30), teacher_stage=3)
    results["split distill"] = anew({"metrics": trained.metrics, "weights": trained.weights})
    results["split actor"] = anew(actor(normed, 1, None, split=size, policy=GSPO, checkpointing=True))
    results["split critic"] = anew(critic(model, 1, split=size, stage=3))
    for stage, dtype in ((1, "bf16"), (2, "fp32"), (3, "bf16")):
        place = folder / f"{dist.get_world_size()} ranks at {stage}"
        place.mkdir(exist_ok=True)
        results[f"split and resumed {stage}"] = anew(resumed(normed, stage, size, dtype, place))
    return results
