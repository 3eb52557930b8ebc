"""Starts the rollout engines and roles of a command on the GPUs that the cluster has reserved."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

import ray

from rlhf_cli.backends.cluster.default_layout import memory_share
from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE, Layout, Seat
from rlhf_cli.backends.cluster.ray_cluster import Cluster, Reservation
from rlhf_cli.backends.roles.groups import RoleGroup
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.worker import AsyncRayWorker, RayWorker
from rlhf_cli.backends.roles.worker_group import WorkerGroup
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_group import EngineGroup
from rlhf_cli.backends.rollout.engine_host import HOST_ENGINE
from rlhf_cli.config.roles import Role
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.environment import SPIN_COUNT, onednn_caches

COLLECT_SECONDS = 0.02
"""Mean interval between calls that collect responses, over all engines: a call costs the driver about 0.4 ms, and 50 in
a second 2 % of a core."""


@dataclass(frozen=True)
class RolePlan:
    """A role to start: its row, the settings of its ranks, and the micro-batch bounds."""

    role: Role
    settings: RoleSettings
    batch: BatchConfig
    quadratic_cost: float


@dataclass(frozen=True)
class EnginePlan:
    """Engines to start: for rollouts, or of a judge (`settings.role`).

    - `model`: folder or Hub name.
    - `gpu_share`: fraction of GPU memory per engine; by default larger on GPUs without other roles.
    - `keeps_weights`: whether sleeping engines keep their weights, because no push replaces them.
    """

    backend: str
    model: str
    settings: EngineSettings
    gpu_share: float | None
    keeps_weights: bool = False


@dataclass(frozen=True)
class Processes:
    """Starts one process per rank of a role and per rollout engine, with a log in `log_dir`.

    Example: two actor ranks and an engine write `actor-0.log`, `actor-1.log` and `engine-0.log`.
    """

    cluster: Cluster
    reservation: Reservation
    log_dir: Path

    @property
    def layout(self) -> Layout:
        """Placement of all roles and engines."""
        return self.reservation.layout

    @property
    def shares_gpus(self) -> bool:
        """Whether rollout engines share GPUs with other roles."""
        return any(seat.shared for seat in self.layout.of(ENGINE))

    @property
    def judge_takes_turns(self) -> bool:
        """Whether a judge shares GPUs with the rollout engines, so that only one of them is awake."""
        return self.cluster.has_gpus and any(seat.shared for seat in self.layout.of(JUDGE))

    @property
    def judge_waits(self) -> bool:
        """Whether a judge is asked only when all responses are known: on a CPU, its batches are reproducible then."""
        return self.judge_takes_turns or not self.cluster.has_gpus

    def _threads(self, role: str) -> int:
        """Return the number of CPU threads for each process of a role."""
        return self.cluster.threads(len(self.layout.of(role)))

    def ranks(self, role: str) -> WorkerGroup[Any]:
        """Start the processes of a role without waiting; `build` loads the role in each."""
        return WorkerGroup(role, [self._start(RayWorker, seat) for seat in self.layout.of(role)], self.log_dir)

    def engine(self, number: int, plan: EnginePlan, environment: dict[str, str]) -> tuple[Any, object]:
        """Start an engine's process and begin to load it. Returns the worker and the pending call."""
        role = plan.settings.role
        seat = self.layout.of(role)[number]
        share = memory_share(plan.gpu_share, shared=seat.shared)
        settings = replace(
            plan.settings,
            gpu_memory_utilization=share,
            num_threads=self._threads(role),
            # A turn of an episode must not wait. Episodes decode their turns themselves.
            collect_seconds=0.0 if plan.settings.decodes_for is None else COLLECT_SECONDS * len(self.layout.of(role)),
        )
        worker = self._start(AsyncRayWorker, seat)
        return worker, worker.build.remote(environment, HOST_ENGINE, plan.backend, plan.model, settings)

    def _start(self, kind: type[RayWorker], seat: Seat) -> Any:
        environment = {
            "OMP_NUM_THREADS": str(self._threads(seat.role)),
            "GOMP_SPINCOUNT": SPIN_COUNT,
            "TOKENIZERS_PARALLELISM": "false",
            **onednn_caches(),
        }
        # Ray would record the states of every call, which is a fifth of the driver's work for hundreds of processes.
        options = self.reservation.options(seat) | {"max_restarts": 0, "enable_task_events": False}
        log_file = self.log_dir / f"{seat.role}-{seat.rank}.log"
        return ray.remote(kind).options(**options).remote(environment=environment, log_file=log_file)


class Started:
    """The running rollout engines, judge and roles of a command; engines stop at the end of the block.

    - `engines`: may still be loading.
    - `judge`: engines of a judge model, if any; asleep if they take turns with the rollout engines.
    - `judge_waits`: as in `Processes`.
    - `roles`: by name, instances of the driver class in the role's row.
    """

    def __init__(
        self,
        processes: Processes,
        plans: Sequence[RolePlan],
        engines: EnginePlan,
        *,
        judge: EnginePlan | None = None,
        takes_turns: bool = False,
        borrowed_actor: Callable[[], AbstractContextManager[int | None]] = nullcontext,
    ) -> None:
        self._processes = processes
        self.judge_waits = processes.judge_waits
        self.roles: dict[str, Any] = {}
        # vLLM measures free memory at startup: on shared GPUs, build the models first and put them to sleep. Otherwise
        # engines start first, because they take longest.
        engines_last = processes.shares_gpus and processes.cluster.has_gpus
        if not engines_last:
            self.engines = self._start_engines(engines, borrowed_actor)
        self.judge: EngineGroup | None = None
        if judge is not None and not processes.judge_takes_turns:
            self.judge = self._start_engines(judge)
        for plan in plans:
            self.roles[plan.role.name] = self._start_role(plan, takes_turns=takes_turns)
        # Roles that share GPUs by sleeping are built one by one, because each fills a GPU while it loads.
        one_by_one = takes_turns and processes.cluster.has_gpus
        for together in [[plan] for plan in plans] if one_by_one else [plans]:
            self._build(together)
        if judge is not None and self.judge is None:
            # Asleep before the rollout engines measure free memory.
            self.judge = self._start_engines(judge)
            self.judge.wait_until_built()
            self.judge.sleep()
        if engines_last:
            self.engines = self._start_engines(engines, borrowed_actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.engines.shutdown()
        if self.judge is not None:
            self.judge.shutdown()

    def _start_engines(
        self, plan: EnginePlan, borrowed_actor: Callable[[], AbstractContextManager[int | None]] = nullcontext
    ) -> EngineGroup:
        role = plan.settings.role
        return EngineGroup(
            lambda number: self._processes.engine(number, plan, self._environment(role, number)),
            num_engines=len(self._processes.layout.of(role)),
            settings=plan.settings,
            keeps_weights=plan.keeps_weights,
            borrowed_actor=borrowed_actor,
        )

    def _environment(self, engine: str, number: int) -> dict[str, str]:
        """Return CUDA_VISIBLE_DEVICES for a multi-GPU engine on shared GPUs: the GPUs of a role's ranks there."""
        layout = self._processes.layout
        seat = layout.of(engine)[number]
        if not (self._processes.cluster.has_gpus and seat.shared and len(seat.gpus) > 1):
            return {}
        role = next(role for role in layout.users(seat.island, seat.gpus[0]) if role not in (ENGINE, JUDGE))
        # Ray assigns fractional GPUs per process, so one process cannot reserve the same set as several ranks.
        visible = self.roles[role].group.visible_gpus()
        here = [other for other in layout.of(role) if other.island == seat.island and other.gpus[0] in seat.gpus]
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[other.rank] for other in here)}

    def _start_role(self, plan: RolePlan, *, takes_turns: bool) -> RoleGroup[Any]:
        """Start the processes of a role; models are loaded by `_build`."""
        group, deepspeed = self._processes.ranks(plan.role.name), plan.settings.deepspeed
        planner = MicroBatchPlanner(
            len(group),
            plan.batch,
            plan.quadratic_cost,
            lambda: group.all(lambda rank: rank.packer.shares_prompts())[0],
            deepspeed.sequence_parallel_size,
            deepspeed.tensor_parallel_size,
        )
        role: RoleGroup[Any] = resolve_name(plan.role.driver)(group, planner, takes_turns=takes_turns)
        return role

    def _build(self, plans: Sequence[RolePlan]) -> None:
        """Load the models of several roles in parallel, and put roles to sleep that take turns."""
        groups = [self.roles[plan.role.name].group for plan in plans]
        building = [
            group.build(plan.role.rank, plan.settings, local_size=self._processes.layout.local_size(plan.role.name))
            for plan, group in zip(plans, groups, strict=True)
        ]
        for group, calls in zip(groups, building, strict=True):
            group.wait(calls)
        for plan in plans:
            self.roles[plan.role.name].sleep()
