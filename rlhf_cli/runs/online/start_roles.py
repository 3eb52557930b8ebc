"""Starts an online command's roles on the cluster; saves, loads and stops them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rlhf_cli.backends.cluster.default_layout import memory_share
from rlhf_cli.backends.cluster.placement import ENGINE, Layout, Seat
from rlhf_cli.backends.cluster.ray_cluster import Cluster, Reservation
from rlhf_cli.backends.roles.groups import (
    ActorRole,
    BaseReference,
    CriticRole,
    Dealer,
    FrozenRole,
    ReferenceRole,
    RewardRole,
    StudentRole,
    TeacherRole,
    TrainedRole,
    TrainedT,
)
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.worker_group import RankT, WorkerGroup, start_engine, start_ranks
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_group import EngineGroup
from rlhf_cli.backends.rollout.engine_host import HOST_ENGINE
from rlhf_cli.backends.weight_sync.adapter_push import vllm_config, vllm_rank
from rlhf_cli.backends.weight_sync.transfer import choose_sync_backend
from rlhf_cli.config.commands.gkd import GKDConfig
from rlhf_cli.config.commands.online import OnlineConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.online import ActorCriticOptimConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import AdapterPlan
from rlhf_cli.models.cost import quadratic_cost
from rlhf_cli.models.reward_model import RewardModelPlan
from rlhf_cli.models.teacher import TeacherModel
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.online.models import OnlineModels, role_names
from rlhf_cli.runs.online.student import hosted_teacher, shares_prompts
from rlhf_cli.runs.trained_model import TrainedModel
from rlhf_cli.trainers.online.actor_turns import ActorTurns
from rlhf_cli.trainers.online.interfaces import Engines, Roles, SampledT, awake
from rlhf_cli.trainers.online.step_scoring import StepScorer, step_finder
from rlhf_cli.trainers.online.update_plan import StepCounts


@dataclass(frozen=True)
class OnlineCluster:
    """Cluster, reservation and settings for starting roles."""

    cluster: Cluster
    reservation: Reservation
    log_dir: Path
    backend: str  # of the rollout engines

    @property
    def layout(self) -> Layout:
        """Placement of all roles."""
        return self.reservation.layout


class OnlineRoles:
    """All roles and engines of a run."""

    def __init__(
        self,
        config: OnlineConfig,
        where: OnlineCluster,
        models: OnlineModels,
        *,
        total_steps: StepCounts,
        end_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._where = where
        self._models = models
        self._total_steps = total_steps
        self._end_ids = end_ids
        self._adapter = engine_adapter(config, models.policy.plan, has_gpus=where.cluster.has_gpus)
        self._sync_backend = choose_sync_backend(
            "shm" if self._adapter else config.rollout.vllm_sync_backend,
            engine=where.backend,
            on_gpu=where.cluster.has_gpus,
            shares_gpus=shares_gpus(where.layout),
        )
        self._takes_turns = bool(config.placement.deepspeed_enable_sleep)
        self._turns = ActorTurns()
        # vLLM measures free memory at startup: on shared GPUs, build the models first and put them to sleep. Otherwise
        # engines start first, because they take longest.
        engines_last = shares_gpus(where.layout) and where.cluster.has_gpus
        if not engines_last:
            self.engines = self._start_engines()
        groups = {role: self._start_ranks(role) for role in role_names(config, models)}
        trained = self._trained(groups["actor"], models.policy)
        self.actor: ActorRole | StudentRole = (StudentRole if config.hosted_roles else ActorRole)(trained)
        self.critic = CriticRole(self._trained(groups["critic"], models.critic)) if models.critic else None
        self.reference = self._reference(trained, groups.get("ref"))
        self.reward_model = self._reward_group(groups["reward"], models.reward) if models.reward else None
        self.teacher = self._teacher(groups.get("teacher"), models.teacher)
        self._build_models(groups)
        if engines_last:
            self.engines = self._start_engines()
        self._connect_engines()
        self.rollout: Engines = self.engines  # replaced by episode engines in episode runs

    def with_scorer(self, actor: SampledT, scorer: Scorer) -> Roles[SampledT]:
        """Return the roles for a training loop. `actor` must be `self.actor`, with its precise type."""
        steps = self._step_scorer()
        return Roles(
            actor,
            self.critic,
            self.reference,
            None if steps else self.reward_model,
            self.rollout,
            scorer,
            self._moving,
            self.teacher,
            steps,
            self._turns,
        )

    def _step_scorer(self) -> StepScorer | None:
        """Return the step scorer if the reward model is a process reward model."""
        found = self._models.reward
        if self.reward_model is None or found is None or found.separator is None:
            return None
        return StepScorer(self.reward_model, step_finder(found, self._models.policy.tokenizer))

    def checkpoint_bytes(self) -> int:
        """Estimate the checkpoint size of all trained roles in bytes."""
        trained = sum(trained.checkpoint_bytes() for trained in self._all_trained().values())
        return trained + (self._moving.num_bytes() if self._moving else 0)

    def save(self, directory: Path) -> None:
        """Save all state that has changed since the start to a folder."""
        for role, trained in self._all_trained().items():
            trained.save(directory / role)
        if self._moving is not None:
            with awake(self._moving):
                self._moving.save(directory / "ref")

    def load(self, directory: Path, *, iteration: int) -> None:
        """Load state written by `save`, and push the weights to the engines, which sleep while models load."""
        self.engines.sleep()
        for role, trained in self._all_trained().items():
            trained.load(directory / role)
        if self._moving is not None:
            with awake(self._moving):
                self._moving.load(directory / "ref")
        self._push(iteration)

    def _push(self, version: int) -> None:
        """Push the actor's weights to the engines. Only weights stay on the GPUs meanwhile, to leave memory for the
        engines.
        """
        with self.actor.trained.awake():
            self.actor.sleep_optimizer()
            self.engines.receive_weights(version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.engines.shutdown()

    def _connect_engines(self) -> None:
        """Wait for the engines, connect them to the actor, and push weights if they differ from those on disk.

        They differ for an existing adapter and for 4-bit weights. With `--lora_push adapter`, an adapter is always
        pushed, so that a run with an adapter that vLLM cannot load fails before sampling.
        """
        self.engines.wait_until_built()
        self.engines.connect(self.actor.trained)
        plan = self._models.policy.plan
        if plan is not None and (plan.weights is not None or plan.in_4bit or self._adapter is not None):
            self.engines.sleep()
            self._push(0)

    def _build_models(self, groups: dict[str, WorkerGroup[object]]) -> None:
        """Build all models. Roles that share GPUs by sleeping are built one by one, because each fills a GPU while it
        loads.
        """
        sleepers = {
            "actor": self.actor,
            "critic": self.critic,
            "ref": self.reference,
            "reward": self.reward_model,
            "teacher": self.teacher,
        }
        one_by_one = self._takes_turns and self._where.cluster.has_gpus
        rounds = [(role,) for role in groups] if one_by_one else [tuple(groups)]
        for roles in rounds:
            building = {role: self._begin_building(groups[role]) for role in roles}
            for role, calls in building.items():
                groups[role].wait(calls)
            for role in roles:
                sleeper = sleepers[role]
                assert sleeper is not None
                sleeper.sleep()

    def _begin_building(self, group: WorkerGroup[object]) -> list[object]:
        role, size = self._config.roles[group.role], self._where.layout.local_size(group.role)
        return group.build(role.rank, self._settings(group.role), local_size=size)

    def _start_engines(self) -> EngineGroup:
        rollout = self._config.rollout
        return EngineGroup(
            self._start_engine,
            num_engines=len(self._where.layout.of(ENGINE)),
            takes_turns=bool(rollout.vllm_enable_sleep),
            sync_backend=self._sync_backend,
            ranks_per_engine=rollout.vllm_tensor_parallel_size,
            adapter_alone=self._adapter is not None,
            borrowed_actor=self._turns.borrowed,
        )

    def _all_trained(self) -> dict[str, TrainedRole[Any]]:
        return {"actor": self.actor.trained} | ({"critic": self.critic.trained} if self.critic else {})

    @property
    def _moving(self) -> ReferenceRole | None:
        """The reference, if it is updated during training."""
        moves = self._config.reference.ref_sync_steps > 0
        return self.reference if moves and isinstance(self.reference, ReferenceRole) else None

    def _reference(
        self, actor: TrainedRole[Any], group: WorkerGroup[Any] | None
    ) -> ReferenceRole | BaseReference | None:
        """Return the reference: a separate model, the actor without its adapter, or None."""
        if group is None:
            asks_base = self._config.policy.init_kl_coef > 0 and self._models.policy.plan is not None
            return BaseReference(actor) if asks_base else None
        return ReferenceRole(
            self._frozen_policy(group, self._models.policy),
            actor=actor,
            alpha=self._config.reference.ref_mixup_alpha,
        )

    def _teacher(self, group: WorkerGroup[Any] | None, model: TeacherModel | None) -> TeacherRole | None:
        """Return the teacher if it has separate ranks."""
        return None if group is None or model is None else TeacherRole(self._frozen_policy(group, model))

    def _frozen_policy(self, group: WorkerGroup[Any], model: TrainedModel | TeacherModel) -> FrozenRole[Any]:
        dealer = self._dealer(group, lambda rank: rank.packer.shares_prompts(), model)
        return FrozenRole(group, dealer, takes_turns=self._takes_turns)

    def _trained(self, group: WorkerGroup[TrainedT], model: TrainedModel) -> TrainedRole[TrainedT]:
        return TrainedRole(
            group,
            self._dealer(group, lambda rank: rank.role.packer.shares_prompts(), model),
            takes_turns=self._takes_turns,
        )

    def _dealer(
        self, group: WorkerGroup[RankT], shares_prompts: Callable[[RankT], bool], model: TrainedModel | TeacherModel
    ) -> Dealer:
        """Return the micro-batch planner for a group. `shares_prompts` queries one rank for shared-prompt support."""
        cost, deepspeed = quadratic_cost(model.found.architecture), self._config.deepspeed.of(group.role)
        return Dealer(
            len(group),
            self._config.batch,
            cost,
            lambda: group.all(shares_prompts)[0],
            deepspeed.sequence_parallel_size,
            deepspeed.tensor_parallel_size,
        )

    def _reward_group(self, group: WorkerGroup[Any], model: RewardModelPlan) -> RewardRole:
        size = self._config.deepspeed.of(group.role).sequence_parallel_size
        dealer = Dealer(len(group), self._config.batch, model.quadratic_cost, ranks_per_sequence=size)
        frozen = FrozenRole(group, dealer, takes_turns=self._takes_turns)
        return RewardRole(frozen, statistics=model.statistics)

    def _threads(self, role: str) -> int:
        """Return the number of CPU threads for each process of a role."""
        return self._where.cluster.threads(len(self._where.layout.of(role)))

    def _start_ranks(self, role: str) -> WorkerGroup[Any]:
        where = self._where
        return start_ranks(role, where.layout, where.reservation, log_dir=where.log_dir, threads=self._threads(role))

    def _settings(self, role: str) -> RoleSettings:
        source, optim = self._source(role), self._config.optim
        rate = optim.actor_learning_rate
        if role == "critic":
            assert isinstance(optim, ActorCriticOptimConfig)
            rate = optim.critic_learning_rate
        settings = role_settings(
            self._config,
            role,
            source.source,
            learning_rate=rate,
            total_steps=self._total_steps.critic if role == "critic" else self._total_steps.actor,
            adapter=source.plan if isinstance(source, TrainedModel) and role != "ref" else None,
            end_ids=self._end_ids,
        )
        return self._with_teacher(settings) if role == "actor" else settings

    def _with_teacher(self, settings: RoleSettings) -> RoleSettings:
        """Return the actor's settings with the hosted teacher, if any."""
        config, teacher = self._config, self._models.teacher
        if not isinstance(config, GKDConfig) or teacher is None:
            return settings
        share = shares_prompts(config, teacher)
        return replace(settings, teacher=hosted_teacher(config, teacher), share_prompts=share)

    def _source(self, role: str) -> TrainedModel | RewardModelPlan | TeacherModel:
        """Return a role's model. The reference starts from the policy."""
        models = self._models
        others = {"critic": models.critic, "reward": models.reward, "teacher": models.teacher}
        source = others.get(role, models.policy)
        assert source is not None
        return source

    def _start_engine(self, number: int) -> tuple[object, object]:
        config, rollout = self._config, self._config.rollout
        seat = self._where.layout.of(ENGINE)[number]
        settings = EngineSettings(
            max_model_len=config.prompts.max_len,
            dtype=config.model.param_dtype,
            seed=config.batch.seed,
            tensor_parallel_size=rollout.vllm_tensor_parallel_size,
            gpu_memory_utilization=memory_share(rollout.vllm_gpu_memory_utilization, shared=seat.shared),
            enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=rollout.enable_prefix_caching,
            enable_sleep=bool(rollout.vllm_enable_sleep),
            sync_backend=self._sync_backend,
            trust_remote_code=config.model.trust_remote_code,
            num_threads=self._threads(ENGINE),
            vllm_args=rollout.engine_arguments,
            max_lora_rank=None if self._adapter is None else vllm_rank(self._adapter),
            max_images_per_prompt=config.pictures.max_images_per_prompt,
            min_pixels=config.pictures.min_pixels,
            max_pixels=config.pictures.max_pixels,
        )
        return start_engine(
            seat,
            self._where.reservation,
            log_dir=self._where.log_dir,
            threads=self._threads(ENGINE),
            environment=self._engine_environment(seat),
            factory=HOST_ENGINE,
            args=(self._where.backend, self._models.policy.found.path, settings),
        )

    def _engine_environment(self, seat: Seat) -> dict[str, str]:
        """Return CUDA_VISIBLE_DEVICES for a multi-GPU engine on shared GPUs: the GPUs of the actor's ranks there."""
        if not (self._where.cluster.has_gpus and seat.shared and len(seat.gpus) > 1):
            return {}
        # Ray assigns fractional GPUs per process, so one process cannot reserve the same set as several actor ranks.
        visible = self.actor.trained.group.visible_gpus()
        here = [s for s in self._where.layout.of("actor") if s.island == seat.island and s.gpus[0] in seat.gpus]
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[actor_seat.rank] for actor_seat in here)}


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
        deepspeed=config.deepspeed.of(role),
        optim=config.optim,
        learning_rate=learning_rate,
        total_steps=total_steps,
        seed=config.batch.seed,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        policy=config.policy,
        share_prompts=config.batch.share_prompts,
        adapter=adapter,
        ema_beta=config.optim.ema_beta if config.optim.enable_ema else None,
        sleeps=bool(config.placement.deepspeed_enable_sleep),
        end_ids=end_ids,
    )


def engine_adapter(config: OnlineConfig, plan: AdapterPlan | None, *, has_gpus: bool) -> dict[str, object] | None:
    """Return the adapter config for engines that load the adapter separately; None if they receive merged weights.

    Raises:
        UsageError: vLLM's adapter kernels do not support the weight type.
    """
    if plan is None or config.adapter.lora_push != "adapter":
        return None
    if has_gpus and config.model.param_dtype == "fp32":
        raise UsageError("--lora_push adapter: on a GPU vLLM requires 16-bit weights; set --param_dtype bf16")
    return vllm_config(plan.config)


def shares_gpus(layout: Layout) -> bool:
    """Return whether rollout engines share GPUs with other roles."""
    return any(seat.shared for seat in layout.of(ENGINE))
