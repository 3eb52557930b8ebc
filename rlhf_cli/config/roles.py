"""Roles in online training: one row per role, with its classes, partners and notices, and the settings of each role.

To add a role, add a row and a group of settings here, and the group to `OnlineConfig` (`commands/online.py`), or to one
command. Flags, model search, placement, startup, checks, identity and a KL term in the loss derive from them. The
log-probs of a frozen policy are in `Rollout.frozen_logprobs`; other drivers need a field in `Roles`
(`trainers/online/interfaces.py`).
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.policy import KLEstimator
from rlhf_cli.config.teachers import ModelsBySource
from rlhf_cli.config.train import ZeroStage

# Names instead of classes, because importing them would import torch.
_RANKS = "rlhf_cli.backends.roles.ranks"
DRIVERS = "rlhf_cli.backends.roles.groups"
FROZEN_POLICY = f"{_RANKS}:FrozenPolicyRank"
"""Ranks of a frozen language model that reads the policy's tokens."""


@dataclass(frozen=True, slots=True)
class Role:
    """A model in an online run.

    - `name`: prefix for flags (`--critic_zero_stage`), logs (`critic-0.log`) and the checkpoint folder.
    - `group`: the command's settings group for the role, with the settings in `rank_settings`.
    - `title`: name in the checkpoint identity; empty if the role starts from the policy.
    - `rank`: class for one process as "module:class". Only that process imports it.
    - `driver`: class for all ranks together, which the loop calls.
    - `pretrain`: setting for the model. With `FROZEN_POLICY` ranks, the role is loaded if it is set.
    - `kl_coef`: setting with the coefficient of a KL penalty toward this frozen policy, which is part of the loss; the
      reference's may be part of the reward instead. Empty without one.
    - `kl_estimator`: setting with its estimator; k3 if empty. In a loss, k1 has a gradient with zero expectation.
    - `partner`: role that shares GPUs if `switch` is set.
    - `absent`: completes "--ref_num_nodes is ignored: ".
    - `host`: role with the ranks that load this model; empty for separate ranks.

    Example: `ROLES["reward"]` shares the critic's GPUs with `--colocate_critic_reward`.
    """

    name: str
    group: str
    title: str
    rank: str
    driver: str
    is_trained: bool = False
    pretrain: str = ""
    kl_coef: str = ""
    kl_estimator: str = ""
    partner: str = ""
    absent: str = ""
    host: str = ""

    @property
    def switch(self) -> str:
        """Setting to colocate the role with its partner; empty without a partner."""
        return f"colocate_{self.partner}_{self.name}" if self.partner else ""

    @property
    def rank_settings(self) -> tuple[str, ...]:
        """Settings of the role's ranks, which do not change its results. A partner's group may have the switch."""
        sizes = (f"{self.name}_num_nodes", f"{self.name}_num_gpus_per_node")
        deepspeed = (f"{self.name}_zero_stage", f"{self.name}_sequence_parallel_size")
        return (*sizes, *filter(None, [self.switch]), *deepspeed)


ROLES = {
    role.name: role
    for role in (
        Role(
            "actor",
            group="placement",
            title="policy",
            rank=f"{_RANKS}:ActorRank",
            driver=f"{DRIVERS}:ActorRole",
            is_trained=True,
        ),
        Role(
            "critic",
            group="critic",
            title="critic",
            rank=f"{_RANKS}:CriticRank",
            driver=f"{DRIVERS}:CriticRole",
            is_trained=True,
            pretrain="critic_pretrain",
        ),
        Role(
            "ref",
            group="reference",
            title="",
            rank=FROZEN_POLICY,
            driver=f"{DRIVERS}:ReferenceRole",
            kl_coef="init_kl_coef",
            kl_estimator="kl_estimator",
            partner="actor",
            absent="a reference requires --init_kl_coef above 0; with an adapter, the actor's base model is the "
            "reference",
        ),
        Role(
            "reward",
            group="reward_ranks",
            title="reward model",
            rank=f"{_RANKS}:RewardRank",
            driver=f"{DRIVERS}:RewardRole",
            pretrain="reward_pretrain",
            partner="critic",
            absent="a reward model requires --reward_pretrain or --prm_pretrain",
        ),
        Role(
            "teacher",
            group="teacher",
            title="teacher",
            rank=FROZEN_POLICY,
            driver=f"{DRIVERS}:TeacherRole",
            pretrain="teacher_pretrain",
            absent="a teacher requires --teacher_pretrain",
        ),
    )
}
"""Roles by name, in the order used for placement and output."""

STUDENT_ROLES = {
    "actor": replace(
        ROLES["actor"], rank="rlhf_cli.backends.roles.student_rank:StudentRank", driver=f"{DRIVERS}:StudentRole"
    ),
    "reward": ROLES["reward"],
    "teacher": replace(ROLES["teacher"], host="actor"),
}
"""Roles for distillation with full distributions, which are too large to send between ranks: the actor's ranks
load the teacher. The loss has no other terms."""


@dataclass(frozen=True, slots=True)
class KLTerm:
    """KL penalty toward a frozen policy."""

    coef: float
    estimator: KLEstimator


class CriticConfig(SettingsGroup):
    """Critic"""

    critic_pretrain: str | None = None
    """Initial critic model. Default: the actor's. May be a language model, or a reward model, which keeps its head. It
    must use the same token IDs.
    """
    critic_learning_rate: float = Field(9e-6, gt=0)
    """Peak learning rate of the critic. Default: ten times higher with --lora_rank."""
    critic_update_steps: int | None = Field(None, gt=0)
    """Optimizer steps of the critic per pass over the responses. Default: as many as the actor."""
    freezing_actor_steps: int = Field(0, ge=-1)
    """Initial iterations that train only the critic, while the engines keep their weights; -1 is 0."""
    value_clip: float = Field(0.5, gt=0)
    """Maximum change of a value per iteration in the loss, in the unit of the rewards."""
    bootstrap_truncated: bool = False
    """Bootstrap truncated responses from the critic's value of their final state instead of 0."""
    critic_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the critic."""
    critic_num_gpus_per_node: int | None = Field(None, gt=0)
    """Critic ranks per node."""
    colocate_critic_reward: bool = False
    """Share GPUs between critic and reward model. The smaller role uses the first GPUs of the larger one."""
    critic_zero_stage: ZeroStage | None = None
    """ZeRO stage of the critic. Default: zero_stage."""
    critic_sequence_parallel_size: int | None = Field(None, gt=0)
    """Sequence parallel size of the critic. Default: sequence_parallel_size."""

    @property
    def critic_only_iterations(self) -> int:
        """Initial iterations that train only the critic."""
        return max(0, self.freezing_actor_steps)


class OnlineReferenceConfig(ReferenceConfig):
    """Reference"""

    ref_offload: bool = False
    """Offload idle weights of reference, reward model and teacher to host memory."""
    ref_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the reference model."""
    ref_num_gpus_per_node: int | None = Field(None, gt=0)
    """Reference ranks per node."""
    colocate_actor_ref: bool = False
    """Share GPUs between actor and reference. The smaller role uses the first GPUs of the larger one."""
    ref_zero_stage: ZeroStage | None = None
    """ZeRO stage of the reference. Default: zero_stage."""
    ref_sequence_parallel_size: int | None = Field(None, gt=0)
    """Sequence parallel size of the reference. Default: sequence_parallel_size."""


class RewardRanksConfig(SettingsGroup):
    """Reward model"""

    reward_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the reward model."""
    reward_num_gpus_per_node: int | None = Field(None, gt=0)
    """Reward model ranks per node: GPUs, or processes without a GPU. In generate and eval also of a process reward
    model, on one node."""
    reward_zero_stage: ZeroStage | None = None
    """ZeRO stage of the reward model. Default: zero_stage. Only stage 3 partitions frozen weights."""
    reward_sequence_parallel_size: int | None = Field(None, gt=0)
    """Sequence parallel size of the reward model. Default: sequence_parallel_size."""


class TeacherConfig(SettingsGroup):
    """Teacher"""

    teacher_pretrain: str | None = None
    """Teacher that scores each token of sampled responses, with or without rewards: a folder, a run directory, or a
    Hugging Face name. It must use the same token IDs, except with --teacher_tokenizer own. With a teacher, init_kl_coef
    defaults to 0, so no reference is loaded.
    """
    teacher_by_source: Annotated[ModelsBySource, Needs("teacher_pretrain")] = None
    """Teachers for rows of some sources: {"code": "CODE_MODEL", "math_*": "MATH_MODEL"}. A row's source is its
    data_source, or else its dataset. All other rows use teacher_pretrain.
    """
    teacher_tokenizer: Annotated[Literal["own"] | None, Needs("teacher_pretrain")] = None
    """own: teachers read the text in their own tokens and chat templates. The log-probs of a span of text, between two
    bytes where tokens of both start, are then compared in place of those of single tokens. Default: the policy's
    tokens, which must have the same IDs.
    """
    distill_coef: Annotated[float, Needs("teacher_pretrain")] = Field(1.0, gt=0)
    """Teacher weight: distill_coef * (teacher log-prob - policy log-prob) is added to each token's advantage."""
    teacher_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the teacher."""
    teacher_num_gpus_per_node: int | None = Field(None, gt=0)
    """Teacher ranks per node."""
    teacher_zero_stage: ZeroStage | None = None
    """ZeRO stage of the teacher. Default: zero_stage."""
    teacher_sequence_parallel_size: int | None = Field(None, gt=0)
    """Sequence parallel size of the teacher. Default: sequence_parallel_size."""

    @property
    def weight(self) -> float | None:
        """Teacher weight; None without a teacher."""
        return None if self.teacher_pretrain is None else self.distill_coef
