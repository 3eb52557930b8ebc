"""Settings that are sent to the ranks of a role: for building it, and for connecting to the engines.

Imports no DeepSpeed, because the driver creates these records.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals
from rlhf_cli.backends.weight_sync.vllm_trainer import CallEngines, Rendezvous
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import CriticConfig
from rlhf_cli.config.rollout import SyncBackend
from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.data.packing.readings import TaughtPack
from rlhf_cli.models.adapters import AdapterPlan
from rlhf_cli.models.distillation import TokenEvents


@dataclass(frozen=True)
class HostedTeachers:
    """Teachers that are loaded by the ranks of their student.

    - `prepare`: takes the teachers. Returns a function (engine, packs) -> micro-batches.
    - `objective`: (model, micro-batch, step totals) -> (loss, metrics).
    - `events`: of each teacher; () if all read the student's tokens.
    """

    models: tuple[ModelConfig, ...]
    deepspeed: DeepSpeedConfig
    prepare: Callable[[Any], Callable[[object, list[TaughtPack]], list[Any]]]
    objective: Callable[[nn.Module, Any, StepTotals], tuple[torch.Tensor, Metrics]]
    events: tuple[TokenEvents, ...] = ()


@dataclass(frozen=True)
class RoleSettings:
    """Settings for building a role. Frozen roles ignore the training settings.

    `other_models`: further frozen policies of the same ranks.
    """

    model: ModelConfig
    deepspeed: DeepSpeedConfig
    seed: int
    optim: OptimConfig = field(default_factory=OptimConfig)
    learning_rate: float = 0.0
    total_steps: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 1
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    share_prompts: bool = False
    adapter: AdapterPlan | None = None
    ema_beta: float | None = None
    sleeps: bool = False
    teachers: HostedTeachers | None = None
    other_models: tuple[ModelConfig, ...] = ()
    end_ids: tuple[int, ...] = ()  # tokens that end a response by the chat template, for the saved model


@dataclass(frozen=True)
class EngineLink:
    """How the actor pushes weights to the engines, and how to reach them."""

    backend: SyncBackend
    call_engines: CallEngines
    num_engines: int
    ranks_per_engine: int
    rendezvous: Rendezvous
    # Push only the adapter: the engines have the base model.
    adapter_alone: bool = False
