"""The roles of online training: one row each, from which every list of roles is derived."""

from dataclasses import dataclass, replace

RANKS = "rlhf_cli.backends.roles.ranks"


@dataclass(frozen=True, slots=True)
class Role:
    """A model of an online run.

    `name` begins its flags (`--critic_zero_stage`), its logs (`critic-0.log`) and its folder in a checkpoint; `title`
    is its name in a checkpoint's identity, empty if it starts as the policy. `rank` ("module:class") is what one
    process holds; only that process imports it. `pretrain` is the setting that names its model. `partner` is the role
    that it shares GPUs with by `switch`. `absent` completes "--ref_num_nodes is ignored: ". `host` is the role in whose
    ranks it is loaded, empty for ranks of its own.

    Example: `ROLES["reward"]` shares the critic's GPUs with `--colocate_critic_reward`.
    """

    name: str
    title: str
    rank: str
    is_trained: bool = False
    pretrain: str = ""
    partner: str = ""
    absent: str = ""
    host: str = ""

    @property
    def switch(self) -> str:
        """The setting that puts the role on the GPUs of its partner; empty without one."""
        return f"colocate_{self.partner}_{self.name}" if self.partner else ""


ROLES = {
    role.name: role
    for role in (
        Role("actor", "policy", f"{RANKS}:ActorRank", is_trained=True),
        Role("critic", "critic", f"{RANKS}:CriticRank", is_trained=True, pretrain="critic_pretrain"),
        Role(
            "ref",
            "",
            f"{RANKS}:ReferenceRank",
            partner="actor",
            absent="there is a reference only with --init_kl_coef above 0, and under an adapter it is the actor's own "
            "base",
        ),
        Role(
            "reward",
            "reward model",
            f"{RANKS}:RewardRank",
            pretrain="reward_pretrain",
            partner="critic",
            absent="there is a reward model only with --reward_pretrain or --prm_pretrain",
        ),
        Role(
            "teacher",
            "teacher",
            f"{RANKS}:ReferenceRank",
            pretrain="teacher_pretrain",
            absent="there is a teacher only with --teacher_pretrain",
        ),
    )
}
"""The roles by name, in the order of their ranks and of lines about them."""
TRAINED = tuple(role.name for role in ROLES.values() if role.is_trained)
FROZEN = tuple(role.name for role in ROLES.values() if not role.is_trained)

STUDENT_ROLES = ROLES | {
    "actor": replace(ROLES["actor"], rank="rlhf_cli.backends.roles.student_rank:StudentRank"),
    "teacher": replace(ROLES["teacher"], host="actor"),
}
"""The roles where the actor learns a teacher's distributions: over all tokens they are too large to send between ranks,
so the teacher is loaded in the actor's."""
