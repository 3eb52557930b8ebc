"""All ranks of one role, addressed as one object from the driver.

Ranks compute in ranks.py, groups.py deals work to them, and placement.py seats them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayTaskError

from rlhf_cli.backends.cluster.placement import Layout, Seat
from rlhf_cli.backends.cluster.ray_cluster import PROCESS_DEATHS, Reservation, death_reason
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.worker import AsyncRayWorker, RayWorker
from rlhf_cli.environment import SPIN_COUNT, onednn_caches
from rlhf_cli.errors import (
    OutOfMemory,
    ProcessDied,
    RunError,
    UsageError,
    first_line,
    full_memory,
    memory_sentence,
)

DEATH_SECONDS = 5.0
"""How long after a rank's failure others are given to turn out dead: Ray takes about a second to notice."""


RankT = TypeVar("RankT")
Work = TypeVar("Work")
Result = TypeVar("Result")


class WorkerGroup(Generic[RankT]):
    """The workers of one role by rank, each of which holds an object of type `RankT`.

    A call is a function of that object, usually a lambda, so that types are checked and a rename reaches it. Ray sends
    the function with the values that it uses: a lambda must name `rank` and plain values, never `self`.
    """

    def __init__(self, role: str, workers: list[Any], log_dir: Path) -> None:
        self.role = role
        self._workers = workers
        self._log_dir = log_dir

    def __len__(self) -> int:
        return len(self._workers)

    def start(self, call: Callable[[RankT], object]) -> list[object]:
        """Begin the same call on every rank; `wait` for the results."""
        return [worker.call.remote(call) for worker in self._workers]

    def start_each(self, call: Callable[[RankT, Work], object], work: Sequence[Work]) -> list[Any]:
        """Begin a call with its own work on every rank; `wait` for the results."""
        return [worker.call.remote(call, share) for worker, share in zip(self._workers, work, strict=True)]

    def wait(self, calls: list[object]) -> list[Any]:
        """Return the results of the calls by rank.

        Raises:
            UsageError, RunError: as raised in the worker.
            RunError: a worker died or failed; names the rank, the reason and its log file.
        """
        pending = {call: rank for rank, call in enumerate(calls)}
        while pending:  # one at a time, so that a dead rank is noticed while others still wait for it
            done, _ = ray.wait(list(pending), num_returns=1)
            rank = pending.pop(done[0])
            try:
                ray.get(done[0])
            except RayTaskError as error:
                if not isinstance(error.cause, UsageError | RunError):
                    self._raise_if_one_died(pending)
                raise self._failure(rank, error) from error
            except PROCESS_DEATHS as error:
                raise self._death(rank, error) from error
        return list(ray.get(calls))

    def _raise_if_one_died(self, pending: dict[object, int]) -> None:
        """Raise ProcessDied if a rank is gone: ranks that were waiting for it fail too, perhaps earlier."""
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=DEATH_SECONDS) if pending else ([], [])
        for call in done:
            try:
                ray.get(call)
            except PROCESS_DEATHS as error:
                raise self._death(pending[call], error) from error
            except RayTaskError:
                continue

    def address(self) -> tuple[str, int]:
        """Return (IP address of rank 0's node, a free port there)."""
        return self.wait([self._workers[0].address.remote()])[0]

    def visible_gpus(self) -> list[str]:
        """Return CUDA_VISIBLE_DEVICES of every rank."""
        return self.wait([worker.visible_gpus.remote() for worker in self._workers])

    def build(self, rank_class: str, settings: RoleSettings, *, local_size: int) -> list[object]:
        """Begin making the role in every rank; `wait` for the calls.

        Args:
            rank_class: "module:class" of a rank.
            local_size: ranks on a node.
        """
        host, port = self.address()
        size = {"WORLD_SIZE": str(len(self)), "LOCAL_RANK": "0", "LOCAL_SIZE": str(local_size)}
        common = size | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        return [
            worker.build.remote(common | {"RANK": str(rank)}, rank_class, settings)
            for rank, worker in enumerate(self._workers)
        ]

    def all(self, call: Callable[[RankT], Result]) -> list[Result]:
        """Return the results of the same call on every rank."""
        return self.wait(self.start(call))

    def all_each(self, call: Callable[[RankT, Work], Result], work: Sequence[Work]) -> list[Result]:
        """Return the results of a call with its own work on every rank."""
        return self.wait(self.start_each(call, work))

    def log_file(self, rank: int) -> Path:
        """Return the file of a rank's output."""
        return self._log_dir / f"{self.role}-{rank}.log"

    def _death(self, rank: int, error: Exception) -> ProcessDied:
        return ProcessDied(f"{self.role} rank {rank} died ({death_reason(error)}); its log is {self.log_file(rank)}")

    def _failure(self, rank: int, error: RayTaskError) -> Exception:
        if isinstance(error.cause, OutOfMemory):
            return OutOfMemory(f"{self.role} rank {rank}: {error.cause}; its log is {self.log_file(rank)}")
        if isinstance(error.cause, UsageError | RunError):
            return error.cause
        with self.log_file(rank).open("a") as log:
            log.write(f"{error}\n")
        if (kind := full_memory(error.cause)) is not None:
            return OutOfMemory(
                f"{self.role} rank {rank}: {memory_sentence(kind, '')}; its log is {self.log_file(rank)}"
            )
        reason = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        return RunError(f"{self.role} rank {rank} failed ({reason}); the full trace is in {self.log_file(rank)}")


def start_ranks(
    role: str, layout: Layout, reservation: Reservation, *, log_dir: Path, threads: int
) -> WorkerGroup[Any]:
    """Start the processes of a role without waiting for them; `build` makes the role in each.

    Args:
        threads: CPU threads of each rank.
    """
    seats = layout.of(role)
    workers = [_worker(RayWorker, seat, reservation, log_dir=log_dir, threads=threads) for seat in seats]
    return WorkerGroup(role, workers, log_dir)


def start_engine(
    seat: Seat,
    reservation: Reservation,
    *,
    log_dir: Path,
    threads: int,
    environment: dict[str, str],
    factory: str,
    args: tuple[object, ...],
) -> tuple[object, object]:
    """Return (worker, building call) of one rollout engine."""
    worker = _worker(AsyncRayWorker, seat, reservation, log_dir=log_dir, threads=threads)
    return worker, worker.build.remote(environment, factory, *args)


def _worker(kind: type[RayWorker], seat: Seat, reservation: Reservation, *, log_dir: Path, threads: int) -> Any:
    options = reservation.options(seat) | {"max_restarts": 0}
    environment = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": SPIN_COUNT, "TOKENIZERS_PARALLELISM": "false"}
    environment |= onednn_caches()
    log_file = log_dir / f"{seat.role}-{seat.rank}.log"
    return ray.remote(kind).options(**options).remote(environment=environment, log_file=log_file)
