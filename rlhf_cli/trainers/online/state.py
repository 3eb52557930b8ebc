"""The settings of the online loop, and its state from one iteration to the next besides the models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.algorithms.estimators.gae import bootstraps
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.model import MovingReferenceConfig
from rlhf_cli.config.online import OnlineBatchConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.rollout import DynamicSamplingConfig, RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import OptimConfig
from rlhf_cli.data.rollouts import SamplingParams
from rlhf_cli.trainers.online.groups import PromptGroup
from rlhf_cli.trainers.online.rollout import Rollout


@dataclass(frozen=True)
class OnlineSettings:
    """The settings the loop itself reads."""

    estimator: Estimator
    rollout: RolloutConfig
    reward: RewardConfig
    policy: PolicyConfig
    batch: OnlineBatchConfig
    reference: MovingReferenceConfig
    optim: OptimConfig
    dynamic: DynamicSamplingConfig | None = None  # None where every prompt's group is trained on
    distill_coef: float | None = None  # None without a teacher
    step_weight: float = 1.0  # of the rewards of steps
    lag: int = 0  # batches that are sampled ahead of training
    partial_rollout: bool = False  # whether weights are pushed in the middle of responses
    end_ids: tuple[int, ...] = ()  # tokens that end a response besides the model's own
    estimator_settings: SettingsGroup | None = None  # that user code brings; None for the policy's settings

    @property
    def sampling(self) -> SamplingParams:
        """How responses are sampled for training."""
        rollout = self.rollout
        return SamplingParams(
            rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
            end_ids=self.end_ids,
        )

    @property
    def needs_old(self) -> bool:
        """Whether the policy's own log-probs are needed whatever the steps are: for the KL divergence in the reward, or
        beside a teacher's.
        """
        has_kl_reward = self.policy.init_kl_coef > 0 and not self.policy.use_kl_loss
        return has_kl_reward or self.distill_coef is not None

    def reference_moves(self, iteration: int) -> bool:
        """Return whether the reference moves after this iteration."""
        return self.reference.ref_sync_steps > 0 and iteration % self.reference.ref_sync_steps == 0

    @property
    def bootstraps(self) -> bool:
        """Return whether the critic values the states in which responses were cut."""
        return bootstraps(self.policy)


@dataclass(frozen=True)
class SourceState:
    """The state of the source of responses, which moves when a batch is sampled.

    `iteration` counts the batches so far. `lengths` are mean response lengths in tokens by source. In runs of several
    episodes `prompt_lengths` holds the lengths of single prompts when they were last sampled, by source and number of
    the row. Under dynamic sampling `num_taken` counts the prompts taken from the order of the run; `postponed` ones are
    asked again; `surplus` are groups for the next batch.
    """

    iteration: int = 0
    lengths: Mapping[str, float] = field(default_factory=dict)
    prompt_lengths: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    num_taken: int = 0
    postponed: Sequence[int] = ()
    surplus: Sequence[PromptGroup] = ()

    def plain(self) -> dict[str, object]:
        """Return all but the groups, as it goes into JSON."""
        return {name: value for name, value in vars(self).items() if name != "surplus"}


@dataclass(frozen=True)
class LoopState:
    """The state of the loop from one iteration to the next besides the models.

    `iteration` counts the iterations of training so far. `ahead` are batches of the next iterations, which are sampled
    already; `source` is the state after the last of them. `skipped` counts the iterations that had no response to train
    on, `skipped_in_a_row` those since the last that had one.
    """

    iteration: int
    kl_coef: float
    entropy_coef: float
    entropy_applied: bool = True
    source: SourceState = field(default_factory=SourceState)
    ahead: Sequence[Rollout] = ()
    skipped: int = 0
    skipped_in_a_row: int = 0

    def plain(self) -> dict[str, object]:
        """Return all but the groups, as it goes into JSON."""
        own = {name: value for name, value in vars(self).items() if name not in ("source", "ahead")}
        return own | {"source": self.source.plain()}

    @classmethod
    def of(
        cls, plain: Mapping[str, Any], *, surplus: Sequence[PromptGroup] = (), ahead: Sequence[Rollout] = ()
    ) -> Self:
        """Return the state of which `plain` made this, with its groups."""
        source = SourceState(**plain["source"], surplus=surplus)
        return cls(**{**plain, "source": source, "ahead": ahead})

    @property
    def weights(self) -> LossWeights:
        """Return the controllers' weights of the terms of the actor's loss."""
        return LossWeights(kl=self.kl_coef, entropy=EntropyState(self.entropy_coef, self.entropy_applied))


def first_state(policy: PolicyConfig) -> LoopState:
    """Return the start of a run."""
    return LoopState(iteration=0, kl_coef=policy.init_kl_coef, entropy_coef=policy.entropy_loss_coef)
