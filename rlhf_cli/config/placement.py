"""Placement of an online run's models on nodes and GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup


class PlacementConfig(SettingsGroup):
    """Placement"""

    actor_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the actor. If no number of nodes, GPUs or engines is set, a run uses all GPUs; without GPUs, 1."""
    actor_num_gpus_per_node: int | None = Field(None, gt=0)
    """Actor ranks per node: GPUs, or processes without GPUs."""
    colocate_all_models: bool | None = None
    """All models share GPUs (the engines share the actor's) and take turns; each has the first ones it needs. By
    default on GPUs where no number of nodes, GPUs or engines is given, unless the run samples while it trains. In
    generate and eval, the reward model uses what vllm_gpu_memory_utilization leaves; by default where there are too
    few GPUs for both."""
    deepspeed_enable_sleep: bool | None = None
    """Offload weights, gradients and optimizer states of idle models to host memory. Default: if all models share
    GPUs and do not fit on them at once.
    """


@dataclass(frozen=True, kw_only=True)
class LayoutSettings:
    """The settings that determine a layout: sizes of roles and engines, and what shares GPUs.

    - `shapes`: (nodes, ranks per node) by role in the run.
    - `pairs`: pairs of roles that share GPUs, including roles that are not in the run.
    - `together`: whether all roles and engines share GPUs.
    - `engine_size`: GPUs per engine, 1 if None.
    - `judge`: (judge engines, GPUs per engine). If the first is None, judge and sleeping rollout engines take turns on
      shared GPUs; on separate ones it is 1. None without a judge model.
    - `models_sleep`, `engines_sleep`: whether idle models and engines leave their GPUs.
    - `is_open`: whether no number of nodes, GPUs or engines is set.

    `fill_layout` replaces None.

    Example, `rlhf ppo --critic_num_gpus_per_node 2`: shapes = {"actor": (1, 1), "critic": (1, 2), "ref": (1, 1)}.
    """

    # Hashes ignore the mapping, which has none.
    shapes: Mapping[str, tuple[int, int]] = field(hash=False)
    pairs: tuple[tuple[str, str], ...] = ()
    together: bool | None = None
    num_engines: int | None = None
    engine_size: int | None = None
    judge: tuple[int | None, int] | None = None
    models_sleep: bool | None = None
    engines_sleep: bool | None = None
    is_open: bool = False

    @property
    def is_free(self) -> bool:
        """Whether no placement setting is given, except GPUs per engine."""
        given = (self.together, self.models_sleep, self.engines_sleep)
        return self.is_open and not self.pairs and all(value is None for value in given)

    @property
    def own_judge(self) -> tuple[int, int] | None:
        """(Judge engines, GPUs per engine) on separate GPUs; None if they take turns with rollout engines."""
        if self.judge is None or (self.together and self.engines_sleep and self.judge[0] is None):
            return None
        return self.judge[0] or 1, self.judge[1]
