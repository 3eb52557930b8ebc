"""The workers of a role, as called from the driver: calls on all ranks, and failures with rank and log file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayTaskError

from rlhf_cli.backends.cluster.ray_cluster import PROCESS_DEATHS, death_reason
from rlhf_cli.backends.roles.serialization import (
    PickledCall,
    RankWork,
    SentColumns,
    SentWork,
    read_stored,
    stored_parts,
)
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.data.stored_arrays import Column, StoredChunk
from rlhf_cli.errors import (
    OutOfMemory,
    ProcessDied,
    RunError,
    Shortage,
    UsageError,
    first_line,
    full_memory,
    one_line,
)

_DEATH_SECONDS = 5.0
"""Seconds to wait after a rank's failure for the death of another rank, which Ray reports after about a second."""

_LOOK_SECONDS = 1.0
"""Interval between looks for ranks that died while others compute."""

_LEAST_SAMPLES = 256
"""Samples of a call of `by_sample`: a call costs the driver about as much as two samples."""

_HeldT = TypeVar("_HeldT")
_Work = TypeVar("_Work")
Result = TypeVar("Result")


class WorkerGroup(Generic[_HeldT]):
    """The workers of a role by rank, each with an object of type `_HeldT`.

    A call is a function of this object, usually a lambda, so that types are checked. Ray pickles the function with all
    values that it refers to. Refer only to the argument and to picklable local variables, never to `self`.
    """

    def __init__(self, role: str, workers: list[Any], log_dir: Path) -> None:
        self.role = role
        self._workers = workers
        self._log_dir = log_dir

    def __len__(self) -> int:
        return len(self._workers)

    def start(self, call: Callable[[_HeldT], object]) -> list[object]:
        """Start a call on all ranks. Pass the result to `wait`."""
        pickled = PickledCall(call)
        return [worker.call.remote(pickled) for worker in self._workers]

    def start_each(self, call: Callable[[_HeldT, _Work], object], work: Sequence[_Work]) -> list[Any]:
        """Start a call on all ranks, each with its element of `work`. Pass the result to `wait`."""
        pickled = PickledCall(call)
        return [worker.call.remote(pickled, share) for worker, share in zip(self._workers, work, strict=True)]

    def wait(self, calls: list[object]) -> list[Any]:
        """Wait for the calls and return the results by rank.

        Raises:
            UsageError, RunError: raised in the worker.
            RunError: a worker died or failed. The message has rank, reason and log file.
        """
        pending = {call: rank for rank, call in enumerate(calls)}
        results = dict[int, Any]()
        while pending:
            # A look costs time for every pending call, so wait for all. But look again every second: after a rank dies,
            # others may wait for it in a collective and never finish.
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_LOOK_SECONDS)
            for call in done:
                rank = pending.pop(call)
                try:
                    results[rank] = ray.get(call)
                except RayTaskError as error:
                    # The error may only be a consequence, such as a closed connection to a rank that died.
                    if not isinstance(error.cause, UsageError | RunError):
                        self._raise_if_one_died(pending)
                    raise self._failure(rank, error) from error
                except PROCESS_DEATHS as error:
                    raise self._death(rank, error) from error
        return [results[rank] for rank in range(len(calls))]

    def _raise_if_one_died(self, pending: dict[object, int]) -> None:
        """Raise ProcessDied if one of these ranks died."""
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_DEATH_SECONDS) if pending else ([], [])
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
        """Start building the role on all ranks. Pass the result to `wait`.

        Args:
            rank_class: "module:class" of a rank.
            local_size: ranks on a node.
        """
        host, port = self.address()
        # Always local rank 0, because Ray shows each process only its own GPU.
        size = {"WORLD_SIZE": str(len(self)), "LOCAL_RANK": "0", "LOCAL_SIZE": str(local_size)}
        common = size | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        return [
            worker.build.remote(common | {"RANK": str(rank)}, rank_class, settings)
            for rank, worker in enumerate(self._workers)
        ]

    def all(self, call: Callable[[_HeldT], Result]) -> list[Result]:
        """Run a call on all ranks and return the results by rank."""
        return self.wait(self.start(call))

    def all_each(self, call: Callable[[_HeldT, RankWork], Result], work: Sequence[RankWork]) -> list[Result]:
        """Run a call on all ranks, each with its element of `work`, and return the results by rank."""
        pickled = PickledCall(lambda rank, sent, *chunks: call(rank, sent.work(chunks)))
        pairs = zip(self._workers, work, strict=True)
        # The chunks are arguments of their own: Ray reads such references before the call, without asking the driver.
        return self.wait([worker.call.remote(pickled, SentWork.of(share), *share.chunks) for worker, share in pairs])

    def all_stored(
        self, call: Callable[[_HeldT, RankWork], Sequence[np.ndarray]], work: Sequence[RankWork]
    ) -> list[Sequence[Column]]:
        """Like `all_each` for a call that returns arrays. They stay in Ray's object store on the node of their rank."""
        found = self.all_each(lambda rank, share: _put(call(rank, share)), work)
        return [
            stored_parts(StoredChunk(reference, partial(self._read, rank)), lengths)
            for rank, (reference, lengths) in enumerate(found)
        ]

    def by_sample(
        self, call: Callable[[dict[str, list[np.ndarray]]], Result], columns: Mapping[str, Sequence[Column]]
    ) -> list[Result]:
        """Call a function of columns, one array per sample, on ranks: these read the stored arrays, not the driver.

        Each call gets consecutive samples. Returns the results in this order.
        """
        count = len(next(iter(columns.values())))
        size = max(_LEAST_SAMPLES, -(-count // len(self)))
        pickled = PickledCall(lambda rank, sent, *chunks: call(sent.arrays(chunks)))
        calls = []
        for worker, first in zip(self._workers, range(0, count, size), strict=False):
            part = {name: column[first : first + size] for name, column in columns.items()}
            sent, chunks = SentColumns.of(part)
            calls.append(worker.call.remote(pickled, sent, *chunks))
        return self.wait(calls)

    def _read(self, rank: int, reference: object) -> np.ndarray:
        try:
            found: np.ndarray = read_stored(reference)
        # A rank owns its results, which end with it.
        except (*PROCESS_DEATHS, ObjectLostError) as error:
            raise self._death(rank, error) from error
        return found

    def _log_file(self, rank: int) -> Path:
        """Return a rank's log file."""
        return self._log_dir / f"{self.role}-{rank}.log"

    def _death(self, rank: int, error: Exception) -> ProcessDied:
        reason = death_reason(error, self.role)
        return ProcessDied(f"{self.role} rank {rank} died (", reason, f"); its log is {self._log_file(rank)}")

    def _failure(self, rank: int, error: RayTaskError) -> Exception:
        where, log_file = f"{self.role} rank {rank}: ", f"; its log is {self._log_file(rank)}"
        if isinstance(error.cause, OutOfMemory) and error.cause.shortage is not None:
            return OutOfMemory(where, replace(error.cause.shortage, role=self.role), log_file)
        if isinstance(error.cause, UsageError | RunError):
            return error.cause
        with self._log_file(rank).open("a") as log:
            log.write(f"{error}\n")
        if (kind := full_memory(error.cause)) is not None:
            return OutOfMemory(where, Shortage(kind, role=self.role, detail=one_line(error.cause)), log_file)
        reason = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        return RunError(f"{self.role} rank {rank} failed ({reason}); the full trace is in {self._log_file(rank)}")


def _put(arrays: Sequence[np.ndarray]) -> tuple[object, list[int]]:
    """Store the arrays as one object. Returns (reference, lengths)."""
    return ray.put(np.concatenate([np.zeros(0, np.float32), *arrays])), list(map(len, arrays))
