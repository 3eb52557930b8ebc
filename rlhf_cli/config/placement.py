"""Placement of an online run's models on nodes and GPUs."""

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.roles import ROLES


class PlacementConfig(SettingsGroup):
    """Placement"""

    actor_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the actor. If no number of nodes, GPUs or engines is set, a run uses all GPUs; without GPUs, 1."""
    actor_num_gpus_per_node: int | None = Field(None, gt=0)
    """Actor ranks per node: GPUs, or processes without GPUs."""
    reward_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the reward model."""
    reward_num_gpus_per_node: int | None = Field(None, gt=0)
    """Reward model ranks per node: GPUs, or processes without a GPU. In generate and eval also of a process reward
    model, on one node."""
    colocate_all_models: bool | None = None
    """All models share GPUs (the engines share the actor's) and take turns; each has the first ones it needs. By
    default on GPUs where no number of nodes, GPUs or engines is given, unless the run samples while it trains. In
    generate and eval, the reward model uses what vllm_gpu_memory_utilization leaves; by default where there are too
    few GPUs for both."""
    deepspeed_enable_sleep: bool | None = None
    """Offload weights, gradients and optimizer states of idle models to host memory. Default: if all models share
    GPUs.
    """
    ref_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the reference model."""
    ref_num_gpus_per_node: int | None = Field(None, gt=0)
    """Reference ranks per node."""
    teacher_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the teacher."""
    teacher_num_gpus_per_node: int | None = Field(None, gt=0)
    """Teacher ranks per node."""
    colocate_actor_ref: bool = False
    """Share GPUs between actor and reference. The smaller role uses the first GPUs of the larger one."""
    critic_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the critic."""
    critic_num_gpus_per_node: int | None = Field(None, gt=0)
    """Critic ranks per node."""
    colocate_critic_reward: bool = False
    """Share GPUs between critic and reward model. The smaller role uses the first GPUs of the larger one."""

    def shape(self, role: str) -> tuple[int, int]:
        """Return (nodes, ranks per node) of a role, 1 by default."""
        return getattr(self, f"{role}_num_nodes") or 1, getattr(self, f"{role}_num_gpus_per_node") or 1

    def num_ranks(self, role: str) -> int:
        """Return the number of ranks of a role."""
        nodes, ranks = self.shape(role)
        return nodes * ranks

    @property
    def has_sizes(self) -> bool:
        """Whether nodes or GPUs are set for any role."""
        names = (name for name in type(self).model_fields if name.endswith(("_num_nodes", "_num_gpus_per_node")))
        return any(getattr(self, name) is not None for name in names)

    @property
    def colocated_pairs(self) -> list[tuple[str, str]]:
        """Pairs of roles that share GPUs."""
        return [(role.partner, role.name) for role in ROLES.values() if role.switch and getattr(self, role.switch)]
