"""Starts an online command's roles on the cluster; saves, loads and stops them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli.backends.roles.groups import (
    ActorRole,
    BaseReference,
    CriticRole,
    ReferenceRole,
    RewardRole,
    StudentRole,
    TrainedRole,
    store_column,
    store_sequences,
)
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.start import EnginePlan, Processes, RolePlan, Started
from rlhf_cli.backends.rollout.engine import engine_settings
from rlhf_cli.backends.weight_sync.adapter_push import vllm_config, vllm_rank
from rlhf_cli.backends.weight_sync.transfer import choose_sync_backend
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import AdapterPlan
from rlhf_cli.models.cost import quadratic_cost
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.online.models import OnlineModels
from rlhf_cli.runs.online.student import hosted_teachers, shares_prompts
from rlhf_cli.runs.trained_model import ModelPlan
from rlhf_cli.trainers.online.interfaces import Engines, FrozenPolicy, Roles, SampledT
from rlhf_cli.trainers.online.lent_actor import LentActor
from rlhf_cli.trainers.online.step_scoring import StepScorer, step_finder
from rlhf_cli.trainers.online.update_plan import StepCounts


class OnlineRoles(Started):
    """All roles and engines in an online run."""

    def __init__(
        self,
        config: OnlineConfig,
        processes: Processes,
        backend: str,
        models: OnlineModels,
        *,
        total_steps: StepCounts,
        end_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._models = models
        # Before the engines, because a restarted engine borrows the actor.
        self._lent_actor = LentActor()
        super().__init__(
            processes,
            [role_plan(config, models, role, total_steps=total_steps, end_ids=end_ids) for role in models.by_role],
            _engine_plan(config, models.policy, backend, processes),
            judge=_judge_plan(config, models, processes),
            takes_turns=bool(config.placement.deepspeed_enable_sleep),
            borrowed_actor=self._lent_actor.borrowed,
        )
        self.actor: ActorRole | StudentRole = self.roles["actor"]
        self.critic: CriticRole | None = self.roles.get("critic")
        # In the order of `ROLES`, in which the loop calls them.
        self.frozen_policies: dict[str, FrozenPolicy] = {
            role: self.roles[role] for role in ("ref", *models.frozen_policies) if role in self.roles
        }
        if config.policy.init_kl_coef > 0 and isinstance(self.actor, ActorRole) and models.policy.plan is not None:
            self.frozen_policies = {"ref": BaseReference(self.actor)} | self.frozen_policies
        self.reward_model: RewardRole | None = self.roles.get("reward")
        if self.reward_model is not None and models.reward is not None:
            self.reward_model.statistics = models.reward.statistics
        self._connect_engines()
        self.rollout: Engines = self.engines  # replaced by episode engines in episode runs

    def with_scorer(self, actor: SampledT, scorer: Scorer) -> Roles[SampledT]:
        """Return the roles for a training loop. `actor` must be `self.actor`, with its precise type."""
        steps = self._step_scorer()
        return Roles(
            actor=actor,
            engines=self.rollout,
            scorer=scorer,
            critic=self.critic,
            frozen_policies=self.frozen_policies,
            reward_model=None if steps else self.reward_model,
            move_reference=self._move_reference(),
            steps=steps,
            store=store_sequences,
            store_column=store_column,
            by_sample=self.actor.group.by_sample,
            lent_actor=self._lent_actor,
        )

    def _move_reference(self) -> Callable[[], None] | None:
        """Return the function that updates the reference toward the actor, if it is updated."""
        if self._moving is None or not isinstance(self.actor, ActorRole):
            return None
        return partial(self._moving.move, self.actor, self._config.reference.ref_mixup_alpha)

    def _step_scorer(self) -> StepScorer | None:
        """Return the step scorer if the reward model is a process reward model."""
        found = self._models.reward
        if self.reward_model is None or found is None or found.separator is None:
            return None
        return StepScorer(self.reward_model, step_finder(found, self._models.policy.tokenizer))

    def checkpoint_bytes(self) -> int:
        """Estimate the checkpoint size of all trained roles in bytes."""
        trained = sum(trained.checkpoint_bytes() for trained in self._trained.values())
        return trained + (self._moving.num_bytes() if self._moving else 0)

    def save(self, directory: Path) -> None:
        """Save all state that has changed since the start to a folder."""
        for role, trained in self._trained.items():
            trained.save(directory / role)
        if self._moving is not None:
            self._moving.save(directory / "ref")

    def load(self, directory: Path, *, iteration: int) -> None:
        """Load state written by `save`, and push the weights to the engines, which sleep while models load."""
        # Free the engines' memory first, because loading states needs room on shared GPUs.
        self.engines.sleep()
        for role, trained in self._trained.items():
            trained.load(directory / role)
        if self._moving is not None:
            self._moving.load(directory / "ref")
        self._push(iteration)

    def _push(self, version: int) -> None:
        """Push the actor's weights to the engines. Only weights stay on the GPUs meanwhile, to leave memory for the
        engines.
        """
        self.actor.wake_weights()
        self.engines.receive_weights(version)
        self.actor.sleep()

    def _connect_engines(self) -> None:
        """Wait for the engines, connect them to the actor, and push weights if they differ from those on disk.

        They differ for an existing adapter and for 4-bit weights. With `--lora_push adapter`, an adapter is always
        pushed, so that a run with an adapter that vLLM cannot load fails before sampling.
        """
        self.engines.wait_until_built()
        if self.judge is not None:
            self.judge.wait_until_built()
        self.engines.connect(self.actor)
        plan, pushes_adapter = self._models.policy.plan, self._config.adapter.lora_push == "adapter"
        # The engines have loaded the model from disk, so an equal policy needs no push.
        if plan is not None and (plan.weights is not None or plan.in_4bit or pushes_adapter):
            self.engines.sleep()
            self._push(0)

    @property
    def _trained(self) -> dict[str, TrainedRole[Any]]:
        return {name: role for name, role in self.roles.items() if name in self._models.trained}

    @property
    def _moving(self) -> ReferenceRole | None:
        """The reference, if it is updated during training."""
        reference = self.frozen_policies.get("ref")
        return reference if self._config.reference.moves and isinstance(reference, ReferenceRole) else None


def role_plan(
    config: OnlineConfig, models: OnlineModels, role: str, *, total_steps: StepCounts, end_ids: tuple[int, ...]
) -> RolePlan:
    """Return the plan of a role."""
    source, optim, is_critic = models.by_role[role], config.optim, role == "critic"
    settings = role_settings(
        config,
        role,
        source.source,
        learning_rate=config.critic.critic_learning_rate if is_critic else optim.actor_learning_rate,
        total_steps=total_steps.critic if is_critic else total_steps.actor,
        adapter=models.trained[role].plan if role in models.trained else None,
        end_ids=end_ids,
    )
    if isinstance(config, GKDConfig) and role == "actor" and models.teacher is not None:
        # The student and its teachers read the same packs.
        share, teachers = shares_prompts(config, models.teachers), hosted_teachers(config, models)
        settings = replace(settings, teachers=teachers, share_prompts=share)
    if role == "teacher":
        settings = replace(settings, other_models=tuple(model.source for model in models.other_teachers))
    return RolePlan(config.roles[role], settings, config.batch, quadratic_cost(source.found.architecture))


def role_settings(
    config: OnlineConfig,
    role: str,
    model: ModelConfig,
    *,
    learning_rate: float,
    total_steps: int,
    adapter: AdapterPlan | None = None,
    end_ids: tuple[int, ...] = (),
) -> RoleSettings:
    """Return the settings for building a role."""
    return RoleSettings(
        model=model,
        deepspeed=config.deepspeed_of(role),
        optim=config.optim,
        learning_rate=learning_rate,
        total_steps=total_steps,
        seed=config.batch.seed,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        policy=config.policy,
        critic=config.critic,
        share_prompts=config.batch.share_prompts,
        adapter=adapter,
        ema_beta=config.optim.ema_beta if config.optim.enable_ema else None,
        sleeps=bool(config.placement.deepspeed_enable_sleep),
        end_ids=end_ids,
    )


def _engine_adapter(config: OnlineConfig, plan: AdapterPlan | None, *, has_gpus: bool) -> dict[str, object] | None:
    """Return the adapter config for engines that load the adapter separately; None if they receive merged weights.

    Raises:
        UsageError: vLLM's adapter kernels do not support the weight type.
    """
    if plan is None or config.adapter.lora_push != "adapter":
        return None
    if has_gpus and config.model.param_dtype == "fp32":
        raise UsageError("--lora_push adapter: on a GPU vLLM requires 16-bit weights; set --param_dtype bf16")
    return vllm_config(plan.config)


def _judge_plan(config: OnlineConfig, models: OnlineModels, processes: Processes) -> EnginePlan | None:
    """Return the plan of a judge's engines, if the run starts a judge."""
    if models.judge is None:
        return None
    return models.judge.plan(processes, config.engine, max_images=config.pictures.max_images_per_prompt)


def _engine_plan(config: OnlineConfig, policy: ModelPlan, backend: str, processes: Processes) -> EnginePlan:
    """Return the plan of the rollout engines."""
    engine, has_gpus = config.engine, processes.cluster.has_gpus
    adapter = _engine_adapter(config, policy.plan, has_gpus=has_gpus)
    settings = engine_settings(
        engine,
        config.model,
        config.pictures,
        max_model_len=config.prompts.max_len,
        seed=config.batch.seed,
        enable_sleep=bool(engine.vllm_enable_sleep),
        sync_backend=choose_sync_backend(
            "shm" if adapter else engine.vllm_sync_backend,
            engine=backend,
            on_gpu=has_gpus,
            shares_gpus=processes.shares_gpus,
        ),
        max_lora_rank=None if adapter is None else vllm_rank(adapter),
        record_routed_experts=config.policy.rollout_routing_replay,
        # The player decodes an episode's turns.
        decodes_for=None if config.episodes.plays_episodes else config.model,
    )
    return EnginePlan(backend, policy.found.path, settings, engine.vllm_gpu_memory_utilization)
