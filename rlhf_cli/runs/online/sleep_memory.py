"""Estimates the host memory of sleeping roles before they start."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from rlhf_cli.backends.cluster.placement import Layout
from rlhf_cli.backends.training.deepspeed_config import OPTIMIZER_BYTES
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.train import OptimizerName
from rlhf_cli.models.finding import find_model
from rlhf_cli.models.memory_fit import num_parameters
from rlhf_cli.runs.online.models import OnlineModels
from rlhf_cli.runs.trained_model import ModelPlan

GIB = 2**30
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class SleepingRole:
    """Sizes that determine how much of a role is offloaded to host memory."""

    num_parameters: int
    num_trained: int
    weight_bytes: int
    zero_stage: int
    num_ranks: int
    optimizer: OptimizerName = "adamw"

    @property
    def moves_trained(self) -> bool:
        """Whether DeepSpeed offloads trained weights and states: not at ZeRO-0, and not in `BF16_Optimizer`."""
        # DeepSpeed's BF16_Optimizer, used at stage 1 with bf16 weights, cannot offload its state.
        is_apart = self.weight_bytes == 4 or self.optimizer == "adamw_bf16"
        return self.zero_stage >= 2 or (self.zero_stage == 1 and is_apart)

    @property
    def host_bytes(self) -> int:
        """Total bytes on all ranks. Optimizer states are partitioned, weights only at ZeRO-3."""
        num_moved = self.num_parameters - (0 if self.moves_trained else self.num_trained)
        copies = 1 if self.zero_stage == 3 else self.num_ranks
        of_optimizer = OPTIMIZER_BYTES[self.optimizer] * self.num_trained if self.moves_trained else 0
        return num_moved * self.weight_bytes * copies + of_optimizer


def sleep_memory_fact(config: OnlineConfig, models: OnlineModels, layout: Layout, *, has_gpus: bool) -> dict[str, str]:
    """Return a summary line about the memory of sleeping roles, if any."""
    if not (has_gpus and config.placement.deepspeed_enable_sleep):
        return {}
    return described(bytes_by_node(config, models, layout), psutil.virtual_memory().total)


def described(by_node: Mapping[int, float], available: int) -> dict[str, str]:
    """Compare the need of the fullest node with this node's memory."""
    needed = max(by_node.values())
    line = f"{needed / GIB:.0f} GiB per node while roles sleep, up to twice that if pinned buffers are rounded up"
    has = f"{available / GIB:.0f} GiB"
    # Warn instead of failing, because the estimate is rough.
    return {"Host memory": f"{line}; this node has {has}" + (", WHICH IS NOT ENOUGH" if needed > available else "")}


def bytes_by_node(config: OnlineConfig, models: OnlineModels, layout: Layout) -> Mapping[int, float]:
    """Return the bytes of sleeping roles per node."""
    found: Counter[int] = Counter()
    for name, role in _roles(config, models, layout).items():
        for seat in layout.of(config.host_of(name)):
            # Each rank moves its part to the memory of its own node.
            found[layout.islands[seat.island].node] += role.host_bytes // role.num_ranks
    return found


def _roles(config: OnlineConfig, models: OnlineModels, layout: Layout) -> dict[str, SleepingRole]:
    roles = {}
    for name, model in models.loaded.items():
        ranks = len(layout.of(config.host_of(name)))
        if not ranks:
            continue
        source = model.base if isinstance(model, ModelPlan) else model.source
        # With an adapter the base model is frozen, and the adapter itself is negligible.
        is_trained = name in models.trained and isinstance(model, ModelPlan) and model.plan is None
        architecture = find_model(source).architecture
        size = num_parameters(architecture, trust_remote_code=source.trust_remote_code)
        stage = config.deepspeed_of(name).zero_stage
        trained = size if is_trained else 0
        roles[name] = SleepingRole(size, trained, WEIGHT_BYTES[source.param_dtype], stage, ranks, config.optim.optim)
    return roles
