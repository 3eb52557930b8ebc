"""Critic, DeepSpeed, batches and optimizers of online training.

Engines and sampling are in rollout.py, nodes and GPUs in placement.py, rewards in scoring.py, the objective in
policy.py.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.roles import FROZEN, ROLES
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig, OptimConfig


class CriticModelConfig(SettingsGroup):
    """Critic"""

    critic_pretrain: str | None = None
    """Model that the critic starts from, by default the actor's: a language model, or a reward model, whose head it
    keeps; same token ids."""


ZeroStage = Literal[0, 1, 2, 3]


class ActorDeepSpeedConfig(DeepSpeedConfig):
    """DeepSpeed"""

    reward_zero_stage: ZeroStage | None = None
    """Stage of the reward model, by default zero_stage; frozen weights are partitioned at 3 and whole at the others."""
    teacher_zero_stage: ZeroStage | None = None
    """Stage of the teacher, by default zero_stage."""
    reward_sequence_parallel_size: int | None = Field(None, gt=0)
    """Ranks of the reward model that share each sequence, by default sequence_parallel_size."""

    @property
    def offloads_frozen(self) -> bool:
        """Whether whole frozen weights are in host memory while they are not used."""
        return False

    def of(self, role: str) -> Self:
        """Return the settings of a role, one of `ROLES`."""
        own = {name: getattr(self, self.name_of(role, name)) for name in ("zero_stage", "sequence_parallel_size")}
        if role in FROZEN:
            own["param_offload"] = self.offloads_frozen or (self.param_offload and own["zero_stage"] == 3)
            own["tensor_parallel_size"] = 1  # only trained models are split
        return self.model_copy(update=own)

    def name_of(self, role: str, name: str) -> str:
        """Return the name of the setting that holds for a role: its own if it is given, else the common one."""
        own = f"{role}_{name}"
        return name if getattr(self, own, None) is None else own

    @property
    def stages(self) -> set[int]:
        """The stages of all roles there can be."""
        return {self.of(role).zero_stage for role in ROLES}

    @property
    def sequence_sizes(self) -> set[int]:
        """The ranks that share a sequence, of all roles there can be."""
        return {self.of(role).sequence_parallel_size for role in ROLES}


class OnlineDeepSpeedConfig(ActorDeepSpeedConfig):
    """DeepSpeed"""

    ref_zero_stage: ZeroStage | None = None
    """Stage of the reference, by default zero_stage."""
    ref_sequence_parallel_size: int | None = Field(None, gt=0)
    """Ranks of the reference that share each sequence, by default sequence_parallel_size."""
    teacher_sequence_parallel_size: int | None = Field(None, gt=0)
    """Ranks of the teacher that share each sequence, by default sequence_parallel_size."""

    ref_offload: bool = False
    """Keep the weights of reference, reward model and teacher in host memory while they are not used."""

    @property
    def offloads_frozen(self) -> bool:
        """Whether whole frozen weights are in host memory while they are not used."""
        return self.ref_offload


class ActorCriticDeepSpeedConfig(OnlineDeepSpeedConfig):
    """DeepSpeed"""

    critic_zero_stage: ZeroStage | None = None
    """Stage of the critic, by default zero_stage."""
    critic_sequence_parallel_size: int | None = Field(None, gt=0)
    """Ranks of the critic that share each sequence, by default sequence_parallel_size."""


class OnlineBatchConfig(BatchConfig):
    """Batches"""

    share_prompts: bool = True
    """Compute a prompt once for its responses in a micro-batch; with attention varlen."""

    @property
    def critic_steps(self) -> int | None:
        """Optimizer steps of the critic in each pass over the responses; None for as many as the actor takes."""
        return None

    @property
    def critic_only_iterations(self) -> int:
        """Iterations at the start in which the critic is trained alone."""
        return 0


class ActorCriticBatchConfig(OnlineBatchConfig):
    """Batches"""

    critic_update_steps: int | None = Field(None, gt=0)
    """Optimizer steps of even size into which the critic cuts each pass over the responses; by default the actor's."""
    freezing_actor_steps: int = Field(0, ge=-1)
    """Iterations at the start in which the critic is trained alone and the engines keep their weights; -1 is 0."""

    @property
    def critic_steps(self) -> int | None:
        """Optimizer steps of the critic in each pass over the responses; None for as many as the actor takes."""
        return self.critic_update_steps

    @property
    def critic_only_iterations(self) -> int:
        """Iterations at the start in which the critic is trained alone."""
        return max(0, self.freezing_actor_steps)


class ActorOptimConfig(OptimConfig):
    """Optimizer"""

    actor_learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of the actor; ten times as much by default if --lora_rank is given."""
    enable_ema: bool = False
    """Keep a moving average of the actor's weights in host memory, and save it as a model of its own, `ema`."""
    ema_beta: float = Field(0.992, ge=0, lt=1)
    """Share of the average that is kept in each optimizer step."""

    @model_validator(mode="after")
    def _a_share_is_of_an_average(self) -> "ActorOptimConfig":
        if not self.enable_ema and self.changed("ema_beta"):
            raise ValueError("ema_beta is about the average of the weights: give --enable_ema")
        return self


class ActorCriticOptimConfig(ActorOptimConfig):
    """Optimizer"""

    critic_learning_rate: float = Field(9e-6, gt=0)
    """Peak learning rate of the critic; ten times as much by default if --lora_rank is given."""
