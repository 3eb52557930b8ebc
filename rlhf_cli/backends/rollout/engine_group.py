"""All rollout engines as the loop sees them: requests spread over them, weights pushed, a dead one started again.

Leaves out the engines themselves (`vllm_engine`, `transformers_engine`) and how weights travel (`weight_sync/`).
"""

import importlib.util
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from rlhf_cli.backends.cluster.ray_cluster import PROCESS_DEATHS, death_reason
from rlhf_cli.backends.roles.groups import SampledRole
from rlhf_cli.backends.roles.settings import EngineLink
from rlhf_cli.backends.rollout.engine import Arrivals, EngineDead
from rlhf_cli.backends.rollout.engine_host import EngineHost
from rlhf_cli.backends.rollout.engine_shares import Listening, SharedBatch, balanced_shares, same_shares
from rlhf_cli.backends.weight_sync.transfer import PushReport
from rlhf_cli.backends.weight_sync.vllm_trainer import HostCall, Rendezvous
from rlhf_cli.config.generate import SamplingConfig
from rlhf_cli.config.rollout import EngineConfig, RolloutConfig, SyncBackend
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import ProcessDied, RunError, UsageError

Result = TypeVar("Result")
EngineCall = Callable[[EngineHost], Awaitable[Result]]

MAX_RESTARTS = 3
"""Engines started again in one run; more deaths have a cause that a restart does not cure."""


def rollout_backend(config: EngineConfig) -> str:
    """Return the engine that generates: as asked for, or vLLM if it is installed. Raise UsageError if it cannot."""
    installed = importlib.util.find_spec("vllm") is not None
    if config.rollout_backend == "vllm" and not installed:
        raise UsageError("--rollout_backend vllm: vLLM is not installed; install rlhf-cli[vllm] (GPU) or rlhf-cli[cpu]")
    backend = config.rollout_backend
    if backend == "auto":
        backend = "vllm" if installed else "transformers"
    if backend != "vllm" and config.vllm_tensor_parallel_size > 1:
        raise UsageError(f"--vllm_tensor_parallel_size needs vLLM; the {backend} rollout backend uses one device")
    return backend


def described(config: RolloutConfig | SamplingConfig, backend: str) -> str:
    """Return the number of engines, their kind and the arguments that a user adds."""
    added = f" with {config.vllm_args}" if config.engine_arguments else ""
    return f"{config.vllm_num_engines or 1} x {backend}{added}"


@dataclass(frozen=True)
class CallWorkers:
    """Calls a method of all engines at once and waits for all of them; travels to the actor's ranks."""

    workers: list[Any]

    def __call__(self, call: HostCall, given: Sequence[object]) -> None:
        """Call `call(host, value)` for every engine with its value, and wait."""
        pairs = zip(self.workers, given, strict=True)
        _get_all([worker.call.remote(call, value) for worker, value in pairs])


class EngineGroup:
    """All rollout engines.

    Args:
        start: begins building the engine of that number; (worker, building call).
        takes_turns: whether engines sleep while models train.
        sync_backend: how weights travel.
        ranks_per_engine: GPUs that share one engine.
        adapter_alone: whether pushes are of the adapter, and engines keep the model under it while they sleep.
        borrowed_actor: holds the actor for the push to an engine that is started again; gives the version of its
            weights, None for the version of the last push.
    """

    def __init__(
        self,
        start: Callable[[int], tuple[Any, object]],
        *,
        num_engines: int,
        takes_turns: bool,
        sync_backend: SyncBackend,
        ranks_per_engine: int,
        adapter_alone: bool = False,
        borrowed_actor: Callable[[], AbstractContextManager[int | None]] = nullcontext,
    ) -> None:
        self._start = start
        self._borrowed_actor = borrowed_actor
        self._actor: SampledRole | None = None
        self._takes_turns = takes_turns
        self._sync_backend = sync_backend
        self._ranks_per_engine = ranks_per_engine
        self._adapter_alone = adapter_alone
        self._sleep_level = 1 if adapter_alone else 2
        self._version = 0
        self._adapter: dict[str, object] | None = None
        self._restarts = 0
        self._batch = SharedBatch([], SamplingParams(0), [])
        self._num_begun = 0  # batches of engines
        started = [start(number) for number in range(num_engines)]
        self._workers = [worker for worker, _ in started]
        self._building = [building for _, building in started]

    def wait_until_built(self) -> None:
        """Return when every engine is ready; raise what kept one from it."""
        for number, building in enumerate(self._building):
            try:
                ray.get(building)
            except RayTaskError as error:
                raise error.cause if isinstance(error.cause, ValueError | RuntimeError) else error from error
            except PROCESS_DEATHS as error:
                raise RunError(f"rollout engine {number} died while it was started ({_reason(error)})") from error

    def connect(self, actor: SampledRole) -> None:
        """Take the weights of this actor from now on; to be called when actor and engines are built."""
        self._actor = actor
        link = EngineLink(
            backend=self._sync_backend,
            call_engines=CallWorkers(self._workers),
            num_engines=len(self._workers),
            ranks_per_engine=self._ranks_per_engine,
            rendezvous=Rendezvous(*actor.group.address()),
            adapter_alone=self._adapter_alone,
        )
        actor.group.all(lambda rank: rank.connect_engines(link))

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Return one response per request, in their order."""
        self.begin(requests, sampling)
        found: dict[int, Generation] = {}
        while self.is_generating:
            found |= self.collect()
        return [found[number] for number in range(len(requests))]

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch, spread over the engines; its responses are to be collected."""
        if sampling.continues:
            shares = same_shares(requests, self._batch)
        else:
            shares = balanced_shares(requests, len(self._workers))
        self._batch = SharedBatch([*requests], sampling, shares)
        for number, share in enumerate(shares):
            if share:
                self._ask_for_share(number)

    def add(self, requests: list[GenerationRequest]) -> None:
        """Join requests to the batch; their numbers go on from the batch's."""
        batch = self._batch
        for number, added in batch.add(requests).items():
            if number not in batch.begun:
                self._ask_for_share(number)
            else:
                self._join(number, added)

    def _join(self, number: int, added: list[GenerationRequest]) -> None:
        """Ask an engine for more, and listen to it if it had finished."""
        batch, share = self._batch, [replace(request, row=None) for request in added]
        begun, first = batch.begun[number], len(batch.shares[number]) - len(share)
        self._call(number, lambda host: host.add(begun, first, share))
        if number not in batch.heard:
            self._listen(number)

    @property
    def is_generating(self) -> bool:
        """Whether responses of the batch are still to come."""
        return bool(self._batch.calls)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return the responses that finished since the last call, each with the number of its request.

        Waits for one, at most `timeout` seconds. An engine that died is started again and its share repeated as a
        whole: a request has the same seed again, and of two responses to it the first one counts.
        """
        batch, found = self._batch, []
        ready, _ = ray.wait(list(batch.calls), num_returns=1, timeout=timeout) if batch.calls else ([], [])
        for call in ready:
            listening = batch.calls.pop(call)
            try:
                arrivals: Arrivals = ray.get(call)
            except (*PROCESS_DEATHS, RayTaskError) as error:
                self._replace(listening.engine, error)
                continue
            found += batch.news(listening.engine, arrivals)
            if not batch.is_over(listening, arrivals):
                self._listen(listening.engine)
        return found

    def cut(self, max_tokens: int) -> None:
        """Give up the responses of the batch that have, or get, more than so many tokens; the others still come."""
        self._batch.max_tokens = max_tokens
        for number in self._batch.begun:  # also of what is added later to an engine that has finished
            self._cut(number, max_tokens)

    def _cut(self, number: int, max_tokens: int) -> None:
        begun = self._batch.begun[number]
        self._call(number, lambda host: host.cut(begun, max_tokens))

    def _ask_for_share(self, number: int) -> None:
        batch = self._batch
        share = [replace(request, row=None) for request in batch.share_again(number)]
        self._num_begun += 1
        begun, sampling, max_tokens = self._num_begun, batch.sampling, batch.max_tokens
        call = self._call(number, lambda host: host.begin(begun, share, sampling, max_tokens))
        batch.begun[number] = begun
        batch.calls[call] = Listening(number, len(share))

    def _listen(self, number: int) -> None:
        begun, count = self._batch.begun[number], len(self._batch.shares[number])
        call = self._call(number, lambda host: host.collect(begun, count))
        self._batch.calls[call] = Listening(number, count)

    def _replace(self, number: int, error: Exception) -> None:
        """Start an engine that died within a batch again, with the present weights, and ask for its share again."""
        if self._actor is not None and (self._takes_turns or self._sync_backend != "shm"):
            self._repeat_with(self._actor, number, error)
            return
        self._restart({number: error})
        if self._actor is not None:
            with self._borrowed_actor() as version, self._actor.awake():
                self.connect(self._actor)
                self._push(self._version if version is None else version, (number,))
        self._ask_for_share(number)

    def _repeat_with(self, actor: SampledRole, number: int, error: Exception) -> None:
        """Do the same when the push concerns all engines: all of them stop, and repeat what they had not finished.

        A push by nccl or ipc needs every engine; on shared GPUs the actor needs the memory of their caches.
        """
        unfinished = [number, *sorted(self._batch.heard)]
        died = {number: error} | self._stop()
        if self._takes_turns:
            self._sleep(other for other in range(len(self._workers)) if other not in died)
        self._restart(died)
        if self._takes_turns:
            self._sleep(died)
        with self._borrowed_actor() as version, actor.awake():
            self.connect(actor)
            actor.sleep_optimizer()
            self.receive_weights(self._version if version is None else version)
        self.wake_cache()
        self._batch.begun.clear()  # an engine that had finished begins again with what is added to it
        for other in unfinished:
            self._ask_for_share(other)

    def _stop(self) -> dict[int, Exception]:
        """Make all engines give up their work; return the engines that died meanwhile."""
        batch, died = self._batch, {}
        for number in batch.heard:
            self._cut(number, 0)
        while batch.calls:
            call, listening = batch.calls.popitem()
            try:
                is_over = batch.is_over(listening, ray.get(call))
            except (*PROCESS_DEATHS, RayTaskError) as error:
                died[listening.engine] = error
                continue
            if not is_over:
                self._listen(listening.engine)
        return died

    def wake_cache(self) -> None:
        """Be ready to generate."""
        if self._takes_turns:
            self._all(lambda host: host.engine.wake(["kv_cache"]))

    def sleep(self) -> None:
        """Leave the accelerators to others."""
        if self._takes_turns:
            self._sleep(range(len(self._workers)))

    def _sleep(self, numbers: Iterable[int]) -> None:
        level = self._sleep_level
        self._each(numbers, lambda host: host.engine.sleep(level))

    def receive_weights(self, version: int) -> dict[str, float]:
        """Take the actor's present weights; metrics of the transfer.

        Engines that died meanwhile are started again, and repeat their share of a batch in flight.
        """
        dead = self._dead()
        died = set(dead)
        if died:
            with self._actor_aside():
                self._restart(dead)
                self._sleep(died if self._takes_turns else ())
        if died and self._actor is not None:
            self.connect(self._actor)
        begin = time.perf_counter()
        if self._takes_turns:
            self._all(lambda host: host.engine.wake(["weights"]))
        report, died_within = self._push(version, range(len(self._workers)))
        self._version = version
        for number in self._batch.forget(died | died_within):
            self._ask_for_share(number)
        return {
            "weight_version": float(version),
            "perf/transfer_gb_per_s": report.num_bytes / 1e9 / (time.perf_counter() - begin),
        }

    def take_adapter(self, manifest: dict[str, object], version: int) -> None:
        """Answer with this adapter on the model from now on; an engine that is started again gets it too."""
        self._revive()
        self._adapter, self._version = manifest, version
        self._each(range(len(self._workers)), lambda host: host.take_push(manifest, version))

    def shutdown(self) -> None:
        """End all engines and their processes."""
        ending = [self._call(number, lambda host: host.engine.shutdown()) for number in range(len(self._workers))]
        for worker, call in zip(self._workers, ending, strict=True):
            try:
                ray.get(call, timeout=30)
            except (*PROCESS_DEATHS, RayTaskError, ray.exceptions.GetTimeoutError):
                ray.kill(worker)

    def _push(self, version: int, numbers: Iterable[int]) -> tuple[PushReport, set[int]]:
        """Push to these engines; return (report, the engines that died meanwhile and were started again)."""
        assert self._actor is not None, "there is no actor to take weights from"
        report = self._actor.group.all(lambda rank: rank.push_weights(version))[0]
        manifest, died = report.manifest, dict[int, Exception]()
        if manifest is not None:  # else the engines have taken part in the push already
            try:
                died = self._failures(numbers, lambda host: host.take_push(manifest, version))
                self._restart(died)
                self._each(died, lambda host: host.take_push(manifest, version))
            finally:
                self._actor.group.all(lambda rank: rank.discard_push())  # shared memory is memory
        if died:
            self.connect(self._actor)
        return report, set(died)

    def _revive(self) -> set[int]:
        """Start engines that died again; return them."""
        died = self._dead()
        self._restart(died)
        return set(died)

    def _dead(self) -> dict[int, Exception]:
        """Return the engines that died, each with the error."""
        return self._failures(range(len(self._workers)), lambda host: host.engine.check_alive())

    @contextmanager
    def _actor_aside(self) -> Iterator[None]:
        """Within the block the actor sleeps, whose weights are else on the GPU: an engine that starts measures the free
        memory.
        """
        if self._actor is None or not self._takes_turns:
            yield
            return
        self._actor.sleep()
        yield
        self._actor.wake()
        self._actor.sleep_optimizer()

    def _failures(self, numbers: Iterable[int], call: EngineCall[object]) -> dict[int, Exception]:
        """Call these engines; return the errors of those that failed."""
        failures: dict[int, Exception] = {}
        for number, asked in [(number, self._call(number, call)) for number in numbers]:
            try:
                ray.get(asked)
            except (*PROCESS_DEATHS, RayTaskError) as error:
                failures[number] = error
        return failures

    def _restart(self, died: Mapping[int, Exception]) -> None:
        """Replace engines that died by new ones, which have the weights of the start yet, or the adapter again.

        The actor does not know them yet: it may be in training.
        """
        for number, error in died.items():
            self._start_again(number, error)
        if self._adapter is not None:
            manifest, version = self._adapter, self._version
            self._each(died, lambda host: host.take_push(manifest, version))

    def _start_again(self, number: int, error: Exception) -> None:
        cause = getattr(error, "cause", None)
        if isinstance(error, RayTaskError) and not isinstance(cause, EngineDead):
            raise cause if isinstance(cause, ValueError | RuntimeError) else error
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise ProcessDied(
                f"rollout engines died {self._restarts} times in this run, the last one was engine {number} "
                f"({_reason(error)})"
            )
        ray.kill(self._workers[number])
        self._workers[number], building = self._start(number)
        try:
            ray.get(building)
        except (*PROCESS_DEATHS, RayTaskError) as again:
            raise ProcessDied(
                f"rollout engine {number} died and could not be started again ({_reason(again)})"
            ) from again

    def _all(self, call: EngineCall[Result]) -> list[Result]:
        return self._each(range(len(self._workers)), call)

    def _each(self, numbers: Iterable[int], call: EngineCall[Result]) -> list[Result]:
        return _get_all([self._call(number, call) for number in numbers])

    def _call(self, number: int, call: EngineCall[object]) -> object:
        """Begin a call of the host of an engine; the function must name plain values only, as Ray sends it."""
        return self._workers[number].call.remote(call)


def _reason(error: Exception) -> str:
    """Return one line of Ray's error about a failed call, whose text is otherwise a trace through several processes."""
    return death_reason(error.cause if isinstance(error, RayTaskError) else error)


def _get_all(calls: list[object]) -> list[Any]:
    try:
        return list(ray.get(calls))
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, ValueError | RuntimeError) else error from error
    except PROCESS_DEATHS as error:
        raise ProcessDied(f"a rollout engine died ({_reason(error)})") from error
