"""Settings and state of the online loop, except the models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import CriticConfig, KLTerm
from rlhf_cli.config.rollout import DynamicSamplingConfig, RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig, OptimConfig
from rlhf_cli.data.rollouts import SamplingParams
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
from rlhf_cli.trainers.online.rollout import SampledGroups
from rlhf_cli.trainers.online.samples import Group


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """Settings used by the loop."""

    estimator: Estimator
    rollout: RolloutConfig
    reward: RewardConfig
    policy: PolicyConfig
    batch: BatchConfig
    critic: CriticConfig
    reference: ReferenceConfig
    optim: OptimConfig
    dynamic: DynamicSamplingConfig | None = None  # None to train on all groups
    kl_terms: Mapping[str, KLTerm] = field(default_factory=dict)  # KL penalties by role
    distill_coef: float | None = None  # None without a teacher
    has_teacher_context: bool = False  # the teacher's prompts differ from the policy's
    teacher_tokens: tuple[TeacherTokens, ...] = ()  # per teacher; () if they use the policy's tokens
    step_weight: float = 1.0  # weight of step rewards
    staleness: int = 0  # number of batches sampled ahead of training
    partial_rollout: bool = False  # push weights during responses
    end_ids: tuple[int, ...] = ()  # additional end-of-response tokens
    estimator_settings: SettingsGroup | None = None  # of a user-defined estimator; None for the policy settings

    @classmethod
    def of(
        cls,
        config: OnlineConfig,
        estimator: Estimator,
        *,
        end_ids: tuple[int, ...] = (),
        teacher_tokens: tuple[TeacherTokens, ...] = (),
    ) -> Self:
        """Return the loop's settings of a command."""
        return cls(
            estimator=estimator,
            rollout=config.rollout,
            reward=config.reward,
            policy=config.policy,
            batch=config.batch,
            critic=config.critic,
            reference=config.reference,
            optim=config.optim,
            dynamic=config.dynamic_sampling,
            kl_terms=config.kl_terms,
            # rlhf gkd leaves this group at its default: with a weight, the loop would compute unused old log-probs.
            distill_coef=config.teacher.weight,
            has_teacher_context=config.prompts.teacher_context_key is not None,
            teacher_tokens=teacher_tokens,
            step_weight=config.reward.prm_weight,
            staleness=config.asynchronous.staleness,
            partial_rollout=config.asynchronous.partial_rollout,
            end_ids=end_ids,
            estimator_settings=config.settings_of_code("advantage_estimator"),
        )

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters for training."""
        rollout = self.rollout
        return SamplingParams(
            rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
            end_ids=self.end_ids,
            returns_experts=self.policy.rollout_routing_replay,
        )

    @property
    def kl_losses(self) -> dict[str, KLTerm]:
        """KL penalties in the loss by role. The reference's is in the reward unless `use_kl_loss` is set."""
        return {role: term for role, term in self.kl_terms.items() if role != "ref" or self.policy.use_kl_loss}

    def reference_moves(self, iteration: int) -> bool:
        """Return whether the reference is updated after this iteration."""
        return self.reference.ref_sync_steps > 0 and iteration % self.reference.ref_sync_steps == 0


@dataclass(frozen=True)
class SourceState:
    """State of the response source, advanced when a batch is sampled.

    - `iteration`: number of batches so far.
    - `lengths`: mean response length in tokens by source.
    - `prompt_lengths`: last response length per prompt by source and row number, in runs with several episodes.
    - `reward_variances`: by key (`curriculum.py`), with `--prompt_sampling variance` or `source_variance`.
    - `num_taken`: number of prompts taken from the run's order with dynamic sampling; `postponed` ones are sampled
      again.
    - `surplus`: groups for the next batch.
    """

    iteration: int = 0
    lengths: Mapping[str, float] = field(default_factory=dict)
    prompt_lengths: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reward_variances: Mapping[str, float] = field(default_factory=dict)
    num_taken: int = 0
    postponed: Sequence[int] = ()
    surplus: Sequence[Group] = ()

    def plain(self) -> dict[str, object]:
        """Return all values except groups, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "surplus"}


@dataclass(frozen=True)
class LoopState:
    """State of the loop between iterations, except the models.

    - `iteration`: number of trained iterations.
    - `ahead`: batches already sampled for the next iterations; `source` is the state after the last one.
    - `skipped`: number of iterations without a response to train on; `skipped_in_a_row` since the last one with.
    """

    iteration: int
    kl_coef: float
    entropy_coef: float
    entropy_applied: bool = True
    source: SourceState = field(default_factory=SourceState)
    ahead: Sequence[SampledGroups] = ()
    skipped: int = 0
    skipped_in_a_row: int = 0

    def plain(self) -> dict[str, object]:
        """Return all values except groups, for JSON."""
        own = {name: value for name, value in vars(self).items() if name not in ("source", "ahead")}
        return own | {"source": self.source.plain()}

    @classmethod
    def of(
        cls, plain: Mapping[str, Any], *, surplus: Sequence[Group] = (), ahead: Sequence[SampledGroups] = ()
    ) -> Self:
        """Restore the state from `plain`, with its groups."""
        source = SourceState(**plain["source"], surplus=surplus)
        return cls(**{**plain, "source": source, "ahead": ahead})

    def weights(self, settings: OnlineSettings) -> LossWeights:
        """Return the loss weights for the next update."""
        kl = settings.kl_losses
        # --kl_target adapts the reference's coefficient.
        if "ref" in kl:
            kl["ref"] = replace(kl["ref"], coef=self.kl_coef)
        return LossWeights(kl, EntropyState(self.entropy_coef, self.entropy_applied))


def first_state(policy: PolicyConfig) -> LoopState:
    """Return the initial state of a run."""
    return LoopState(iteration=0, kl_coef=policy.init_kl_coef, entropy_coef=policy.entropy_loss_coef)
