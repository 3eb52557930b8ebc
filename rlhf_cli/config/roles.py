"""Roles in online training: one row per role, with its classes, partners and notices.

A role also needs its size and ZeRO stage as settings (`{role}_num_nodes`, `{role}_num_gpus_per_node`,
`{role}_zero_stage` in `config/placement.py` and `config/train.py`), its model in `runs/online/models.py`, and the loop
that uses it.
"""

from dataclasses import dataclass, replace

# Names instead of classes, because importing them would import torch.
RANKS = "rlhf_cli.backends.roles.ranks"
DRIVERS = "rlhf_cli.backends.roles.groups"


@dataclass(frozen=True, slots=True)
class Role:
    """A model in an online run.

    - `name`: prefix for flags (`--critic_zero_stage`), logs (`critic-0.log`) and the checkpoint folder.
    - `title`: name in the checkpoint identity; empty if the role starts from the policy.
    - `rank`: class for one process as "module:class". Only that process imports it.
    - `driver`: class for all ranks together, which the loop calls.
    - `pretrain`: setting for the model.
    - `partner`: role that shares GPUs if `switch` is set.
    - `absent`: completes "--ref_num_nodes is ignored: ".
    - `host`: role with the ranks that load this model; empty for separate ranks.

    Example: `ROLES["reward"]` shares the critic's GPUs with `--colocate_critic_reward`.
    """

    name: str
    title: str
    rank: str
    driver: str
    is_trained: bool = False
    pretrain: str = ""
    partner: str = ""
    absent: str = ""
    host: str = ""

    @property
    def switch(self) -> str:
        """Setting to colocate the role with its partner; empty without a partner."""
        return f"colocate_{self.partner}_{self.name}" if self.partner else ""


ROLES = {
    role.name: role
    for role in (
        Role("actor", "policy", f"{RANKS}:ActorRank", f"{DRIVERS}:ActorRole", is_trained=True),
        Role(
            "critic",
            "critic",
            f"{RANKS}:CriticRank",
            f"{DRIVERS}:CriticRole",
            is_trained=True,
            pretrain="critic_pretrain",
        ),
        Role(
            "ref",
            "",
            f"{RANKS}:ReferenceRank",
            f"{DRIVERS}:ReferenceRole",
            partner="actor",
            absent="a reference requires --init_kl_coef above 0; with an adapter, the actor's base model is the "
            "reference",
        ),
        Role(
            "reward",
            "reward model",
            f"{RANKS}:RewardRank",
            f"{DRIVERS}:RewardRole",
            pretrain="reward_pretrain",
            partner="critic",
            absent="a reward model requires --reward_pretrain or --prm_pretrain",
        ),
        Role(
            "teacher",
            "teacher",
            f"{RANKS}:ReferenceRank",
            f"{DRIVERS}:TeacherRole",
            pretrain="teacher_pretrain",
            absent="a teacher requires --teacher_pretrain",
        ),
    )
}
"""Roles by name, in the order used for placement and output."""
TRAINED = tuple(role.name for role in ROLES.values() if role.is_trained)
FROZEN = tuple(role.name for role in ROLES.values() if not role.is_trained)

STUDENT_ROLES = ROLES | {
    "actor": replace(
        ROLES["actor"], rank="rlhf_cli.backends.roles.student_rank:StudentRank", driver=f"{DRIVERS}:StudentRole"
    ),
    "teacher": replace(ROLES["teacher"], host="actor"),
}
"""Roles for distillation with full distributions, which are too large to send between ranks: the actor's ranks
load the teacher."""
