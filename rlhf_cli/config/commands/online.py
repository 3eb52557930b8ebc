"""The settings of commands that train on own responses; each replaces groups by its own, which may add fields."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.episodes import EpisodeConfig, check_environment_reward
from rlhf_cli.config.evaluation import EvaluationConfig
from rlhf_cli.config.model import ModelConfig, MovingReferenceConfig, OnlineLoraConfig
from rlhf_cli.config.online import (
    ActorCriticBatchConfig,
    ActorCriticDeepSpeedConfig,
    ActorCriticOptimConfig,
    ActorDeepSpeedConfig,
    ActorOptimConfig,
    CriticModelConfig,
    OnlineBatchConfig,
    OnlineDeepSpeedConfig,
)
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.placement import ActorPlacementConfig, CriticPlacementConfig, PlacementConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.presets import defaults_of_adapter, defaults_of_loss, defaults_of_roles
from rlhf_cli.config.rewards import REWARDS
from rlhf_cli.config.rollout import AsyncConfig, DynamicSamplingConfig, RolloutConfig
from rlhf_cli.config.scoring import SHAPING, STEP_REWARDS, RewardConfig
from rlhf_cli.config.teacher import TeacherConfig, learning_alone
from rlhf_cli.config.train import OnlineCheckpointConfig, TrackingConfig


class OwnResponsesConfig(CommandConfig):
    """Settings of a command that trains a model on its own responses, whatever it learns from them."""

    unsupported = STEP_REWARDS | SHAPING

    model: ModelConfig
    adapter: OnlineLoraConfig = OnlineLoraConfig()
    prompts: PromptConfig
    pictures: PicturesConfig = PicturesConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    placement: ActorPlacementConfig = ActorPlacementConfig()
    batch: OnlineBatchConfig = OnlineBatchConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    optim: ActorOptimConfig = ActorOptimConfig()
    deepspeed: ActorDeepSpeedConfig = ActorDeepSpeedConfig()
    checkpoint: OnlineCheckpointConfig
    tracking: TrackingConfig = TrackingConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return defaults_of_adapter(given, cls.model_fields["optim"].default)

    @property
    def episode_settings(self) -> EpisodeConfig:
        """The settings of episodes with an environment."""
        return EpisodeConfig()

    @property
    def policy_settings(self) -> PolicyConfig:
        """The settings of a policy's objective; without one, they ask for no reference."""
        return PolicyConfig(init_kl_coef=0.0)

    @property
    def reference_settings(self) -> MovingReferenceConfig:
        """The settings of a reference that moves."""
        return MovingReferenceConfig()

    @property
    def teacher_settings(self) -> TeacherConfig:
        """The settings of a teacher that is a role of its own."""
        return TeacherConfig()

    @property
    def teacher_pretrain(self) -> str | None:
        """The teacher, wherever it is placed; None without one."""
        return self.teacher_settings.teacher_pretrain

    @property
    def hosted_roles(self) -> tuple[str, ...]:
        """The roles that have no ranks of their own and live in the actor's."""
        return ()

    def host_of(self, role: str) -> str:
        """Return the role in whose ranks a role lives, most often its own."""
        return "actor" if role in self.hosted_roles else role

    @property
    def lag(self) -> int:
        """Iterations that sampling is ahead of training."""
        return 0

    @property
    def partial_rollout(self) -> bool:
        """Whether weights are pushed in the middle of responses."""
        return False

    @property
    def dynamic_sampling(self) -> DynamicSamplingConfig | None:
        """The settings of dynamic sampling; None if it is off or the command has none."""
        return None

    @model_validator(mode="after")
    def _evaluations_have_a_reward(self) -> Self:
        if self.evaluation.changed("eval_dataset") and not self.reward.is_given:
            raise ValueError("eval_dataset is about scores, and a teacher gives none: give a reward too")
        return self

    @model_validator(mode="after")
    def _best_is_judged(self) -> Self:
        key = self.evaluation.best_metric_key
        if key is not None and key != "eval/reward" and not self.reward.has_verifier:
            raise ValueError(
                f"best_metric_key {key} counts right responses: name a verifier in --reward_funcs, or take eval/reward"
            )
        return self


class OnlineConfig(OwnResponsesConfig):
    """Settings of an online command without a critic."""

    unsupported = STEP_REWARDS

    episodes: EpisodeConfig = EpisodeConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    teacher: TeacherConfig = TeacherConfig()
    policy: PolicyConfig = PolicyConfig()
    reference: MovingReferenceConfig = MovingReferenceConfig()
    placement: PlacementConfig = PlacementConfig()
    deepspeed: OnlineDeepSpeedConfig = OnlineDeepSpeedConfig()

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return super().implied(given) | defaults_of_loss(given) | defaults_of_roles(given)

    @property
    def episode_settings(self) -> EpisodeConfig:
        """The settings of episodes with an environment."""
        return self.episodes

    @property
    def lag(self) -> int:
        """Iterations that sampling is ahead of training."""
        return self.asynchronous.lag

    @property
    def partial_rollout(self) -> bool:
        """Whether weights are pushed in the middle of responses."""
        return self.asynchronous.partial_rollout

    @property
    def policy_settings(self) -> PolicyConfig:
        """The settings of the policy's objective."""
        return self.policy

    @property
    def reference_settings(self) -> MovingReferenceConfig:
        """The settings of a reference that moves."""
        return self.reference

    @property
    def teacher_settings(self) -> TeacherConfig:
        """The settings of the teacher."""
        return self.teacher

    @property
    def distils_alone(self) -> bool:
        """Whether the policy learns from a teacher and from no reward."""
        return self.teacher.teacher_pretrain is not None and not self.reward.has_weight

    @model_validator(mode="after")
    def _there_is_something_to_learn_from(self) -> "OnlineConfig":
        if self.teacher.teacher_pretrain is None and not self.reward.is_given:
            raise ValueError(
                f"no reward: give --reward_funcs ({', '.join(REWARDS)}), --reward_func FILE.py, "
                "--reward_pretrain MODEL, --remote_rm_url URL or a --teacher_pretrain MODEL"
            )
        return self

    @model_validator(mode="after")
    def _episodes_have_an_environment(self) -> "OnlineConfig":
        check_environment_reward(self.episodes, self.reward)
        return self

    @model_validator(mode="after")
    def _settings_of_scores_have_one(self) -> "OnlineConfig":
        reward = self.reward
        given = reward.changed("reward_clip_range", "overlong_buffer_len", "stop_properly_penalty_coef")
        if given and not reward.is_given:
            raise ValueError(f"{given} is about scores, and a teacher gives none: give a reward too")
        return self

    @model_validator(mode="after")
    def _a_divergence_is_taken_off_a_reward(self) -> "OnlineConfig":
        if self.distils_alone and self.policy.init_kl_coef > 0 and not self.policy.use_kl_loss:
            raise ValueError(
                "init_kl_coef is taken off the reward, and only the teacher counts here: give --use_kl_loss with "
                "--kl_estimator k3, or --init_kl_coef 0"
            )
        return self


class FilteringConfig(OnlineConfig):
    """Settings of an online command that can resample prompts by their responses' usefulness, and reward steps."""

    unsupported = frozenset({"reward.prm_aggregation"})

    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()

    @property
    def dynamic_sampling(self) -> DynamicSamplingConfig | None:
        """The settings of dynamic sampling; None if it is off."""
        return self.dynamic if self.dynamic.dynamic_filtering else None

    @model_validator(mode="after")
    def _steps_add_to_a_reward(self) -> "FilteringConfig":
        if self.reward.prm_pretrain is not None and self.distils_alone:
            raise ValueError("prm_pretrain adds rewards of steps to others, and only the teacher counts here")
        return self

    @model_validator(mode="after")
    def _prompts_are_judged_by_rewards(self) -> "FilteringConfig":
        if self.distils_alone and self.dynamic.dynamic_filtering:
            raise ValueError("dynamic_filtering replaces prompts by their rewards, and only the teacher counts here")
        return self


class CriticConfig(FilteringConfig):
    """Settings of an online command that trains a critic."""

    policy: ActorCriticPolicyConfig = ActorCriticPolicyConfig()
    critic: CriticModelConfig = CriticModelConfig()
    placement: CriticPlacementConfig = CriticPlacementConfig()
    batch: ActorCriticBatchConfig = ActorCriticBatchConfig()
    optim: ActorCriticOptimConfig = ActorCriticOptimConfig()
    deepspeed: ActorCriticDeepSpeedConfig = ActorCriticDeepSpeedConfig()

    @model_validator(mode="after")
    def _a_critic_values_rewards(self) -> "CriticConfig":
        if self.distils_alone:
            raise ValueError(f"a critic values rewards, and only the teacher counts here: {learning_alone()}")
        return self
