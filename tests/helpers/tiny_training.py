"""Tiny models with DeepSpeed: data, steps, weights, and the same training in plain PyTorch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.backends.training.partitioned_loading import partitioned_loading
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig, OptimConfig
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel, parameter_groups
from rlhf_cli.trainers.offline.loop import Share, bind
from rlhf_cli.trainers.offline.sft import sft_objective

LEARNING_RATE = 1e-3
CLOSE = LEARNING_RATE / 10
"""Tolerated weight distance after three steps: where gradients are near Adam's eps of 1e-8, rounding, which differs
between processors, changes a step by up to LEARNING_RATE.
"""
OPTIM = OptimConfig(lr_scheduler="constant", max_norm=0.5, l2=0.1)

NOISE = "k_proj.bias"
"""A key bias shifts all logits of a query equally: its gradient is rounding noise, which Adam scales to full steps."""


def make_sequences(count: int, *, seed: int = 0) -> list[TokenSequence]:
    """Return random sequences of 3 to 12 tokens below 40, about half of them trained."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        length = int(rng.integers(3, 13))
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        sequences.append(TokenSequence(rng.integers(0, 40, length).astype(np.int32), mask))
    return sequences


@dataclass
class Items:
    """Sequences for the offline loop. Records the number per micro-batch."""

    sequences: list[TokenSequence]
    sizes: list[int] = field(default_factory=list)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(sequence) for sequence in self.sequences])

    @property
    def num_trained(self) -> np.ndarray:
        return np.array([sequence.num_trained for sequence in self.sequences])

    @property
    def patches(self) -> None:
        return None

    def collate(self, indices: Sequence[int]) -> Pack:
        self.sizes.append(len(indices))
        return pack([self.sequences[index] for index in indices])


@dataclass(frozen=True)
class Layout:
    """Assignment of a step to micro-batches and ranks."""

    rank: int = 0
    num_ranks: int = 1
    max_tokens: int = 1000
    max_sequences: int | None = None
    train_batch_size: int = 128
    ranks_per_sequence: int = 1
    ranks_per_layer: int = 1

    @property
    def ranks_per_pack(self) -> int:
        return self.ranks_per_sequence * self.ranks_per_layer

    def together(self) -> dict[str, Any]:
        """Settings of ranks that compute packs together."""
        return {"sequence_parallel_size": self.ranks_per_sequence, "tensor_parallel_size": self.ranks_per_layer}

    def share(self) -> Share:
        batch = BatchConfig(
            train_batch_size=self.train_batch_size,
            train_max_tokens_per_gpu=self.max_tokens,
            micro_train_batch_size=self.max_sequences,
        )
        place = self.rank // self.ranks_per_pack, self.num_ranks // self.ranks_per_pack
        return Share(*place, batch, quadratic_cost=0.0, ranks_per_sequence=self.ranks_per_sequence)


def partition(stage: int, *, dtype: str = "fp32") -> AbstractContextManager[None] | None:
    """Return the context for loading a model at this stage."""
    return partitioned_loading(DeepSpeedConfig(zero_stage=stage), param_dtype=dtype)  # type: ignore[arg-type]


def load_policy(path: str, stage: int, *, dtype: str = "fp32", **model: Any) -> tuple[Any, PolicyModel]:
    """Return (Hugging Face model, policy), partitioned during loading at stage 3, like in the commands."""
    source = ModelConfig(pretrain=path, param_dtype=dtype, **model)  # type: ignore[arg-type]
    hf_model = load_causal_lm(source, partition=partition(stage, dtype=dtype))
    return hf_model, PolicyModel(hf_model)


def make_engine(
    module: nn.Module,
    stage: int,
    *,
    dtype: str = "fp32",
    optim: OptimConfig = OPTIM,
    learning_rate: float = LEARNING_RATE,
    **zero: Any,
) -> DeepSpeedEngine:
    return DeepSpeedEngine(
        module,
        DeepSpeedConfig(zero_stage=stage, **zero),  # type: ignore[arg-type]
        optim=optim,
        learning_rate=learning_rate,
        total_steps=10,
        param_dtype=dtype,
    )


def train(
    engine: DeepSpeedEngine, items: Items, steps: Sequence[Sequence[int]], layout: Layout
) -> list[dict[str, float]]:
    """Return metrics per step. A step is a list of sequence numbers."""
    metrics = []
    for indices in steps:
        micro_batches, totals = layout.share().micro_batches(items, np.array(indices))
        metrics.append(engine.train_step(micro_batches, bind(sft_objective, totals)))
    return metrics


def weights_of(engine: DeepSpeedEngine, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all full weights. Call on all ranks."""
    return {name: weight.clone() for name, weight in engine.named_weights(module)}


def train_plainly(
    module: PolicyModel, items: Items, steps: Sequence[Sequence[int]], *, optim: OptimConfig = OPTIM
) -> list[dict[str, float]]:
    """Run the same steps in plain PyTorch, one sequence at a time, with accumulated gradients."""
    groups = parameter_groups(module, optim.l2)
    adam = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=optim.adam_betas)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.train()
    metrics = []
    for indices in steps:
        chosen = [items.sequences[index] for index in indices]
        num_tokens = sum(sequence.num_trained for sequence in chosen)
        losses = [-module(pack([sequence]))[0].sum() for sequence in chosen]
        loss = torch.stack(losses).sum() / num_tokens
        adam.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, optim.max_norm)
        adam.step()
        metrics.append({"loss": loss.item(), "grad_norm": norm.item()})
    return metrics


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the maximum weight difference between two models, excluding parameters with noise gradients."""
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one if NOISE not in name)


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
