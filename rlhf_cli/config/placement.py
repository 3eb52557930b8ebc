"""The nodes and GPUs of the models of an online run."""

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup


class ActorPlacementConfig(SettingsGroup):
    """Placement"""

    actor_num_nodes: int = Field(1, gt=0)
    """Nodes of the actor."""
    actor_num_gpus_per_node: int = Field(1, gt=0)
    """Actor ranks per node: GPUs, or processes without a GPU."""
    reward_num_nodes: int = Field(1, gt=0)
    """Nodes of the reward model."""
    reward_num_gpus_per_node: int = Field(1, gt=0)
    """Reward model ranks per node."""
    colocate_all_models: bool = False
    """All models share GPUs (the engines share the actor's) and take turns; each has the first ones it needs."""
    deepspeed_enable_sleep: bool = False
    """Move weights, gradients and optimizer states of idle trainers to host memory."""

    def num_ranks(self, role: str) -> int:
        """Return the number of ranks of a role, one of `config.online.ROLES`."""
        ranks: int = getattr(self, f"{role}_num_nodes") * getattr(self, f"{role}_num_gpus_per_node")
        return ranks

    @property
    def colocated_pairs(self) -> list[tuple[str, str]]:
        """The pairs of roles that share GPUs."""
        return []


class PlacementConfig(ActorPlacementConfig):
    """Placement"""

    ref_num_nodes: int = Field(1, gt=0)
    """Nodes of the reference model."""
    ref_num_gpus_per_node: int = Field(1, gt=0)
    """Reference ranks per node."""
    teacher_num_nodes: int = Field(1, gt=0)
    """Nodes of the teacher."""
    teacher_num_gpus_per_node: int = Field(1, gt=0)
    """Teacher ranks per node."""
    colocate_actor_ref: bool = False
    """Actor and reference share GPUs, the smaller one the first of the other's."""

    @property
    def colocated_pairs(self) -> list[tuple[str, str]]:
        """The pairs of roles that share GPUs."""
        return [("actor", "ref")] if self.colocate_actor_ref else []


class CriticPlacementConfig(PlacementConfig):
    """Placement"""

    critic_num_nodes: int = Field(1, gt=0)
    """Nodes of the critic."""
    critic_num_gpus_per_node: int = Field(1, gt=0)
    """Critic ranks per node."""
    colocate_critic_reward: bool = False
    """Critic and reward model share GPUs, the smaller one the first of the other's."""

    @property
    def colocated_pairs(self) -> list[tuple[str, str]]:
        """The pairs of roles that share GPUs."""
        return super().colocated_pairs + ([("critic", "reward")] if self.colocate_critic_reward else [])
