"""Builds the roles of an online command on the cluster and keeps them together: start, save, load, end."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlhf_cli.algorithms.table import Algorithm
from rlhf_cli.backends.engine_group import EngineGroup, host_engine
from rlhf_cli.backends.online_roles import ActorGroup, CriticGroup, Dealer, ReferenceGroup, TrainedGroup
from rlhf_cli.backends.placement import ENGINE, Layout
from rlhf_cli.backends.ray_cluster import Cluster, Reservation
from rlhf_cli.backends.role_group import WorkerGroup, start_engine, start_ranks
from rlhf_cli.backends.roles import Actor, Critic, Reference, RoleSettings
from rlhf_cli.backends.rollout_engine import EngineSettings
from rlhf_cli.commands.ppo import PPOConfig
from rlhf_cli.models.loading import load_config, quadratic_cost, resolve_model_path
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.trainers.rl import Roles


def role_names(config: PPOConfig, algorithm: Algorithm) -> tuple[str, ...]:
    """The roles this run has besides the engines; a reference only where the KL divergence counts."""
    critic = ("critic",) if algorithm.critic else ()
    reference = ("ref",) if config.policy.init_kl_coef > 0 else ()
    return ("actor", *critic, *reference)


@dataclass(frozen=True)
class OnlineCluster:
    """Where the roles go."""

    cluster: Cluster
    layout: Layout
    log_dir: Path
    backend: str  # of the rollout engines


class OnlineRoles:
    """All roles and engines of a run, started together and ended together."""

    def __init__(self, config: PPOConfig, algorithm: Algorithm, where: OnlineCluster, *, total_steps: int) -> None:
        self._config = config
        self._where = where
        self._total_steps = total_steps
        self._reservation = Reservation(where.layout, where.cluster)
        self._takes_turns = config.placement.deepspeed_enable_sleep
        self._quadratic_cost = quadratic_cost(load_config(config.model))
        names = role_names(config, algorithm)
        actor, actor_building = self._start("actor", Actor, config.optim.actor_learning_rate)
        started = [(actor, actor_building)]
        if "critic" in names:
            started.append(self._start("critic", Critic, config.optim.critic_learning_rate))
        if "ref" in names:
            started.append(self._start("ref", Reference, config.optim.actor_learning_rate))
        self.engines = EngineGroup(
            self._start_engine,
            num_engines=config.rollout.vllm_num_engines,
            actor=actor,
            takes_turns=config.rollout.vllm_enable_sleep,
        )
        for group, building in started:
            group.wait(building)
        self.engines.wait_until_built()
        groups = {group.role: group for group, _ in started}
        self.actor = ActorGroup(self._trained(actor))
        self.critic = CriticGroup(self._trained(groups["critic"])) if "critic" in groups else None
        self.reference = None
        if "ref" in groups:
            self.reference = ReferenceGroup(groups["ref"], self._dealer(groups["ref"]), takes_turns=self._takes_turns)

    def with_scorer(self, scorer: Scorer) -> Roles:
        """The roles as the loop takes them."""
        return Roles(self.actor, self.critic, self.reference, self.engines, scorer)

    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of all trained roles, as an estimate."""
        return sum(trained.checkpoint_bytes() for trained in self._all_trained().values())

    def save(self, directory: Path) -> None:
        """Write actor and critic, as one unit, below a folder."""
        for role, trained in self._all_trained().items():
            trained.save(directory / role)

    def load(self, directory: Path, *, iteration: int) -> None:
        """Restore what `save` wrote and give the engines the actor's weights."""
        for role, trained in self._all_trained().items():
            trained.load(directory / role)
        self.engines.receive_weights(iteration)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.engines.shutdown()
        self._reservation.release()

    def _all_trained(self) -> dict[str, TrainedGroup]:
        return {"actor": self.actor.trained} | ({"critic": self.critic.trained} if self.critic else {})

    def _trained(self, group: WorkerGroup) -> TrainedGroup:
        return TrainedGroup(group, self._dealer(group), takes_turns=self._takes_turns)

    def _dealer(self, group: WorkerGroup) -> Dealer:
        return Dealer(len(group), self._config.batch, self._quadratic_cost)

    def _threads(self, role: str) -> int:
        """CPU threads of a rank: roles take turns, the ranks of a role share the cores."""
        return max(1, (os.cpu_count() or 1) // len(self._where.layout.of(role)))

    def _start(self, role: str, factory: type, learning_rate: float) -> tuple[WorkerGroup, list[Any]]:
        config = self._config
        settings = RoleSettings(
            model=config.model,
            deepspeed=config.deepspeed,
            optim=config.optim,
            learning_rate=learning_rate,
            total_steps=self._total_steps,
            seed=config.batch.seed,
            temperature=config.rollout.temperature,
            policy=config.policy,
        )
        return start_ranks(
            role,
            self._where.layout,
            self._reservation,
            log_dir=self._where.log_dir,
            threads=self._threads(role),
            factory=factory,
            args=(settings,),
        )

    def _start_engine(self, number: int) -> tuple[Any, Any]:
        config, rollout = self._config, self._config.rollout
        settings = EngineSettings(
            max_model_len=config.prompts.max_len,
            dtype=config.model.param_dtype,
            seed=config.batch.seed,
            tensor_parallel_size=rollout.vllm_tensor_parallel_size,
            gpu_memory_utilization=rollout.vllm_gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=rollout.enable_prefix_caching,
            enable_sleep=rollout.vllm_enable_sleep,
            trust_remote_code=config.model.trust_remote_code,
            num_threads=self._threads(ENGINE),
        )
        return start_engine(
            self._where.layout.of(ENGINE)[number],
            self._reservation,
            log_dir=self._where.log_dir,
            threads=self._threads(ENGINE),
            environment={},
            factory=host_engine,
            args=(self._where.backend, resolve_model_path(config.model.pretrain), settings),
        )
