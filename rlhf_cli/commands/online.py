"""Settings of commands that train on sampled responses."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from rlhf_cli.command_table import COMMANDS
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig, check_environment_reward
from rlhf_cli.config.evaluation import EvaluationConfig
from rlhf_cli.config.model import CriticModelConfig, LoraConfig, ModelConfig, ReferenceConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.placement import PlacementConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.presets import defaults_of_adapter, defaults_of_loss, defaults_of_roles
from rlhf_cli.config.rewards import REWARDS
from rlhf_cli.config.roles import ROLES, Role
from rlhf_cli.config.rollout import AsyncConfig, DynamicSamplingConfig, EngineConfig, RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.teacher import TeacherConfig, learning_alone
from rlhf_cli.config.train import BatchConfig, CheckpointConfig, DeepSpeedConfig, OptimConfig, TrackingConfig

NEVER_ONLINE = frozenset(
    {
        "reward.prm_aggregation",
        "rollout.repetition_penalty",
        "rollout.seed",
        "optim.learning_rate",
        "batch.max_steps",
        "batch.eval_steps",
        "batch.stop_eval_loss",
        "model.keep_dropout",
        "reference.ref_pretrain",
        "reference.precompute_ref_log_probs",
        "reference.ref_offload",
        "episodes.turns",
    }
)
"""Settings unsupported by all online commands."""

OF_A_CRITIC = frozenset(
    {
        "critic",
        "optim.critic_learning_rate",
        "batch.critic_update_steps",
        "batch.freezing_actor_steps",
        "placement.critic_num_nodes",
        "placement.critic_num_gpus_per_node",
        "placement.colocate_critic_reward",
        "deepspeed.critic_zero_stage",
        "deepspeed.critic_sequence_parallel_size",
    }
)
"""Settings supported only by commands with a critic."""


class OnlineConfig(CommandConfig):
    """Settings of a command that trains on sampled responses. Each command lists unsupported settings."""

    roles: ClassVar[Mapping[str, Role]] = ROLES
    """Possible roles of the command."""
    compares_rewards: ClassVar[str] = ""
    """Why the command cannot train with only a teacher; empty if it can."""

    model: ModelConfig
    adapter: LoraConfig = LoraConfig()
    prompts: PromptConfig
    template: TemplateConfig = TemplateConfig()
    pictures: PicturesConfig = PicturesConfig()
    episodes: EpisodeConfig = EpisodeConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    reward: RewardConfig = RewardConfig()
    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()
    teacher: TeacherConfig = TeacherConfig()
    policy: PolicyConfig = PolicyConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticModelConfig = CriticModelConfig()
    placement: PlacementConfig = PlacementConfig()
    batch: BatchConfig = BatchConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    optim: OptimConfig = OptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()

    @property
    def estimator(self) -> str:
        """The command's row in the table of estimators."""
        return COMMANDS[self.command].estimator or self.command

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        rates = defaults_of_adapter(given, cls.model_fields["optim"].default)
        return rates | defaults_of_loss(given) | defaults_of_roles(given)

    def host_of(self, role: str) -> str:
        """Return the role with the ranks that load this role's model: the role itself unless hosted."""
        return self.roles[role].host or role

    @property
    def hosted_roles(self) -> tuple[str, ...]:
        """Roles without separate ranks."""
        return tuple(name for name, role in self.roles.items() if role.host)

    @property
    def dynamic_sampling(self) -> DynamicSamplingConfig | None:
        """Dynamic sampling settings; None if disabled."""
        return self.dynamic if self.dynamic.dynamic_filtering else None

    @property
    def distils_alone(self) -> bool:
        """Whether the policy trains with a teacher and no reward."""
        return self.teacher.teacher_pretrain is not None and not self.reward.has_weight

    @model_validator(mode="after")
    def _there_is_something_to_learn_from(self) -> Self:
        has_teacher = "teacher" in self.hosted_roles or self.teacher.teacher_pretrain is not None
        if not has_teacher and not self.reward.is_given:
            raise ValueError(
                f"no reward: give --reward_funcs ({', '.join(REWARDS)}), --reward_func FILE.py, "
                "--reward_pretrain MODEL, --remote_rm_url URL or a --teacher_pretrain MODEL"
            )
        return self

    @model_validator(mode="after")
    def _episodes_have_an_environment(self) -> Self:
        check_environment_reward(self.episodes, self.reward)
        return self

    @model_validator(mode="after")
    def _scores_have_a_reward(self) -> Self:
        shaping = self.reward.changed("reward_clip_range", "overlong_buffer_len", "stop_properly_penalty_coef")
        given = self.evaluation.changed("eval_dataset") or shaping
        if given and not self.reward.is_given:
            raise ValueError(f"{given} is about scores, and a teacher gives none: give a reward too")
        return self

    @model_validator(mode="after")
    def _best_is_judged(self) -> Self:
        key = self.evaluation.best_metric_key
        if key is not None and key != "eval/reward" and not self.reward.has_verifier:
            raise ValueError(
                f"best_metric_key {key} counts right responses: name a verifier in --reward_funcs, or take eval/reward"
            )
        return self

    @model_validator(mode="after")
    def _nothing_else_needs_a_reward(self) -> Self:
        if not self.distils_alone:
            return self
        policy = self.policy
        if policy.init_kl_coef > 0 and not policy.use_kl_loss:
            raise ValueError(
                "init_kl_coef is taken off the reward, and only the teacher counts here: give --use_kl_loss with "
                "--kl_estimator k3, or --init_kl_coef 0"
            )
        if self.reward.prm_pretrain is not None:
            raise ValueError("prm_pretrain adds rewards of steps to others, and only the teacher counts here")
        if self.dynamic.dynamic_filtering:
            raise ValueError("dynamic_filtering replaces prompts by their rewards, and only the teacher counts here")
        if self.compares_rewards:
            raise ValueError(f"{self.compares_rewards}, and only the teacher counts here: {learning_alone()}")
        return self
