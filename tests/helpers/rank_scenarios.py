"""Work of one rank in multi-rank tests, started by `start_ranks`.

Scenarios run on one and two ranks; tests compare the files of all ranks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distill_training import distill_steps
from preference_training import make_pairs, make_reference, prm_task, run_steps
from shared_roles import pictured_actor
from tiny_training import OPTIM, Items, Layout, load_policy, make_engine, make_sequences, train, weights_of
from torch import nn
from vision_sequences import vision_sequences

from rlhf_cli.algorithms.aggregation import StepTotals, token_mean
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_engine import whole_weights
from rlhf_cli.backends.training.frozen_model import FrozenEngine, move_weights
from rlhf_cli.backends.training.random_states import seed_everything
from rlhf_cli.backends.training.weight_average import WeightAverage
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.trainers.offline import dpo
from rlhf_cli.trainers.offline.loop import bind
from rlhf_cli.trainers.offline.pairs import PairItems
from rlhf_cli.trainers.offline.reference_logprobs import all_results
from rlhf_cli.trainers.offline.sft import sft_objective

STEPS = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9]]
"""The last step has one sequence, so one of two ranks is idle."""
STAGES = (0, 1, 2, 3)
TYPES = (("fp32", "adamw"), ("bf16", "adamw"), ("bf16", "adamw_bf16"))
SAVED = [
    *((stage, dtype, optimizer) for dtype, optimizer in TYPES for stage in STAGES),
    *((stage, "fp32", "muon") for stage in STAGES[:3]),
    (1, "bf16", "muon"),
]
"""Stages, weight dtypes and optimizers to save and load."""
HYBRIDS = ("qwen3_5_text", "granitemoehybrid")
"""Types with recurrent layers, trained at stages 2 and 3."""


def layout(**bounds: Any) -> Layout:
    return Layout(dist.get_rank(), dist.get_world_size(), **bounds)


def steps(model: str, stage: int, **options: Any) -> dict[str, Any]:
    """Run three float32 steps."""
    items = Items(make_sequences(10))
    hf_model, module = load_policy(model, stage)
    engine = make_engine(module, stage, **options)
    metrics = train(engine, items, STEPS, layout(max_tokens=30))
    return {"metrics": metrics, "weights": weights_of(engine, hf_model), "sizes": items.sizes}


def resume(model: str, stage: int, dtype: str, optimizer: str, folder: Path) -> dict[str, Any]:
    """Return whether a saved and reloaded engine continues identically."""
    items = Items(make_sequences(10))
    optim = OPTIM.model_copy(update={"optim": optimizer})
    results = []
    for is_first in (True, False):
        seed_everything(dist.get_rank() if is_first else 99)
        hf_model, module = load_policy(model, stage, dtype=dtype)
        engine = make_engine(module, stage, dtype=dtype, optim=optim)
        if is_first:
            train(engine, items, STEPS[:2], layout())
            engine.save(folder)
        else:
            engine.load(folder)
        metrics = train(engine, items, STEPS[2:] + STEPS[:1], layout())
        results.append((metrics, weights_of(engine, hf_model), torch.rand(3)))
    (metrics, weights, drawn), (again, same_weights, drawn_again) = results
    return {
        "metrics": metrics == again,
        "weights": all(torch.equal(weights[name], same_weights[name]) for name in weights),
        "random numbers": torch.equal(drawn, drawn_again),
        "drawn": drawn,
        "steps": metrics,
        "result": weights,
    }


def shifted(objective: Any, *, by: float) -> Any:
    return lambda model, batch: (objective(model, batch)[0] + by, {})


def spoiled(model: str, stage: int) -> dict[str, Any]:
    """Run three steps. In the second, the last rank's loss is infinite, which must have no effect."""
    results = []
    for is_spoiled in (False, True):
        items = Items(make_sequences(10))
        hf_model, module = load_policy(model, stage)
        engine = make_engine(module, stage)
        metrics = train(engine, items, STEPS[:1], layout())
        if is_spoiled:
            micro_batches, totals = layout().share().micro_batches(items, np.array(STEPS[0]))
            excess = torch.inf if dist.get_rank() == dist.get_world_size() - 1 else 0.0
            objective = bind(sft_objective, totals)
            metrics.append(engine.train_step(micro_batches, shifted(objective, by=excess)))
        metrics += train(engine, items, STEPS[1:2], layout())
        results.append((metrics, weights_of(engine, hf_model)))
    (_, weights), (metrics, others) = results
    return {
        "skipped": [step["skipped_steps"] for step in metrics],
        "weights": all(torch.equal(weights[name], others[name]) for name in weights),
    }


def average(model: str, stage: int) -> dict[str, torch.Tensor]:
    """Return a moving average of the weights over two steps."""
    items = Items(make_sequences(10))
    hf_model, module = load_policy(model, stage)
    engine = make_engine(module, stage)
    kept = WeightAverage(list(hf_model.named_parameters()), beta=0.75)
    for step in STEPS[:2]:
        train(engine, items, [step], layout())
        kept.update()
    return dict(kept.weights())


def moved(model: str) -> dict[str, torch.Tensor]:
    """Return a frozen, partitioned policy moved halfway to zero; the first rank decides the position."""
    hf_model, module = load_policy(model, 3)
    FrozenEngine(module, DeepSpeedConfig(zero_stage=3), param_dtype="fp32")
    named = list(hf_model.named_parameters())
    is_first = dist.get_rank() == 0
    targets = {name: torch.full(tuple(p.ds_shape), 0.0 if is_first else 9.0) for name, p in named}  # type: ignore[attr-defined]
    move_weights(hf_model, targets, 0.5)
    return {name: weight.clone() for name, weight in whole_weights(named, gather=True, bucket_bytes=1 << 20)}


class Counter(nn.Module):
    """Its weight's gradient is the sum of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def sum_over_ranks(stage: int) -> float:
    """Return the gradient norm of 256 + 1, which bf16 cannot represent; with two ranks, each contributes one number."""
    numbers = [torch.tensor([number], dtype=torch.bfloat16) for number in (256, 1)]
    engine = make_engine(Counter(), stage, dtype="bf16")
    own = numbers if dist.get_world_size() == 1 else numbers[dist.get_rank() :][:1]
    return engine.train_step(own, lambda model, x: (model(x).sum(), {}))["grad_norm"]


def critic(model: str) -> list[dict[str, float]]:
    """Run two ZeRO-3 steps of a value model with target 1."""
    items = Items(make_sequences(7))
    hf_model = load_value_backbone(ModelConfig(pretrain=model, param_dtype="fp32"))
    engine = make_engine(ValueModel(hf_model), 3)

    def squared_error(module: nn.Module, batch: Any, totals: StepTotals) -> Any:
        loss = token_mean((module(batch) - 1).square(), totals)
        return loss, {"value_loss": loss.detach()}

    metrics = []
    for _ in range(2):
        micro_batches, totals = layout().share().micro_batches(items, items.lengths.argsort())
        metrics.append(engine.train_step(micro_batches, bind(squared_error, totals)))
    return metrics


def inference(model: str) -> list[torch.Tensor]:
    """Return log-probs of packs and an idle pack from a frozen, partitioned policy."""
    sequences = make_sequences(6)
    _, module = load_policy(model, 3)
    frozen = FrozenEngine(module, DeepSpeedConfig(zero_stage=3), param_dtype="fp32")
    packs = [pack(sequences[:2]), pack([]), pack(sequences[2:])]
    return frozen.infer(packs, lambda policy, batch: policy(batch)[0])


def reference_columns(model: str) -> np.ndarray:
    """Return log-probs of a frozen policy for 9 pairs, 8 at a time, so that one of two ranks has no item in the last
    chunk.
    """
    items = PairItems(make_pairs(9), share_prompts=True, read_ends=False, columns={})
    share = Layout(dist.get_rank(), dist.get_world_size(), train_batch_size=8).share()
    frozen = make_reference(model, 0, seed=5)
    return all_results(frozen, dpo.batch_logprobs, items, share=share, gather=distributed.gather_rows)


def evaluation(model: str) -> dict[str, float]:
    """Return metrics over seven sequences at ZeRO-3."""
    items = Items(make_sequences(7))
    _, module = load_policy(model, 3)
    micro_batches, totals = layout(max_tokens=30).share().micro_batches(items, items.lengths.argsort())
    return make_engine(module, 3).evaluate(micro_batches, bind(sft_objective, totals))


def decisions() -> list[Any]:
    """Return the number and error of the first rank, as received by this rank."""

    def refuse() -> None:
        raise UsageError(f"rank {dist.get_rank()} refuses")

    found: list[Any] = [distributed.by_first_rank(dist.get_rank)]
    try:
        distributed.by_first_rank(refuse)
    except UsageError as error:
        found.append(str(error))
    return found


def vision_steps(folder: Path, stage: int) -> dict[str, Any]:
    """Run three steps of a vision-language model. With two ranks, one has images and the other text, or nothing."""
    items = Items(vision_sequences(folder, [[(56, 84), (60, 60)], [], [(112, 56)], [], [(30, 90)]]))
    hf_model, module = load_policy(str(folder), stage)
    engine = make_engine(module, stage)
    metrics = train(engine, items, [[0, 1], [2, 3], [4]], layout())
    return {"metrics": metrics, "weights": weights_of(engine, hf_model)}


def main(model: str, mixture: str, vision: str, delta: str, mamba: str, out: str) -> None:
    folder = Path(out)
    distributed.join_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}
    for stage in STAGES:
        results[f"steps {stage}"] = steps(model, stage)
        results[f"sum {stage}"] = sum_over_ranks(stage)
        results[f"spoiled {stage}"] = spoiled(model, stage)
    for stage, dtype, optimizer in SAVED:
        saved = folder / f"{num_ranks}_{stage}_{dtype}_{optimizer}"
        saved.mkdir(exist_ok=True)
        results[f"resume {stage} {dtype} {optimizer}"] = resume(model, stage, dtype, optimizer, saved)
    for kind, hybrid in zip(HYBRIDS, (delta, mamba), strict=True):
        for stage in (2, 3):
            results[f"steps {kind} {stage}"] = steps(hybrid, stage)
            saved = folder / f"{num_ranks}_{kind}_{stage}"
            saved.mkdir(exist_ok=True)
            results[f"resume {kind} {stage}"] = resume(hybrid, stage, "bf16", "adamw", saved)
    results |= {f"average {stage}": average(model, stage) for stage in (0, 2, 3)}
    results["moved"] = moved(model)
    results["zpg"] = steps(model, 3, zpg=num_ranks)
    results["overlap"] = steps(model, 2, overlap_comm=True)
    results["router loss"] = steps(mixture, 3, optim=OPTIM.model_copy(update={"aux_loss_coef": 0.5}))
    for stage, teacher_stage in ((2, 3), (3, 0)):
        trained = distill_steps(model, mixture, stage, layout(max_tokens=30), teacher_stage=teacher_stage)
        results[f"distill {stage}"] = {"metrics": trained.metrics, "weights": trained.weights}
        trained = run_steps(model, prm_task(), stage, layout(max_tokens=60))
        results[f"prm {stage}"] = {"metrics": trained.metrics, "weights": trained.weights}
    results |= {f"vision {stage}": vision_steps(Path(vision), stage) for stage in STAGES}
    results["vision actor"] = pictured_actor(Path(vision))
    results["critic"] = critic(model)
    results["inference"] = inference(model)
    results["reference columns"] = torch.from_numpy(reference_columns(model))
    results["evaluation"] = evaluation(model)
    results["reduced"] = distributed.reduce_metrics({"sum": rank + 1.0, "largest_max": rank * 2.0})
    results["votes"] = [distributed.any_rank(False), distributed.any_rank(rank == num_ranks - 1)]
    results["decisions"] = decisions()
    torch.save(results, folder / f"rank{rank}of{num_ranks}.pt")
    distributed.leave_process_group()
