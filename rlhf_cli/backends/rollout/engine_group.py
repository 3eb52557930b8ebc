"""The group of all rollout engines: distributes requests, pushes weights and restarts dead engines.

Runs in the driver. Engines are in `vllm_engine` and `transformers_engine`, transports in `weight_sync/`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE
from rlhf_cli.backends.cluster.ray_cluster import PROCESS_DEATHS
from rlhf_cli.backends.roles.groups import SampledRole
from rlhf_cli.backends.roles.serialization import PickledCall
from rlhf_cli.backends.roles.settings import EngineLink
from rlhf_cli.backends.rollout.engine import Arrivals, EngineDead, EngineSettings
from rlhf_cli.backends.rollout.engine_failures import cause_of, get_all, reason_of
from rlhf_cli.backends.rollout.engine_host import EngineHost
from rlhf_cli.backends.rollout.engine_shares import Listening, SharedBatch, balanced_shares, same_shares
from rlhf_cli.backends.weight_sync.transfer import PushReport
from rlhf_cli.backends.weight_sync.vllm_trainer import HostCall, Rendezvous
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import ProcessDied, RunError

Result = TypeVar("Result")
_EngineCall = Callable[[EngineHost], Awaitable[Result]]

# Between two looks at the calls, the event loop runs episodes and pushes. Responses soon after a look are short.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.01
_PAUSE_PER_LOOK = 200.0

# Pickled once: pickling a function takes longer than the rest of a call.
_BEGIN = PickledCall(lambda host, *args: host.begin(*args))
_ADD = PickledCall(lambda host, *args: host.add(*args))
_CUT = PickledCall(lambda host, *args: host.cut(*args))
_COLLECT = PickledCall(lambda host, *args: host.collect(*args))

_TITLES = {ENGINE: "rollout engine", JUDGE: "judge engine"}
MAX_RESTARTS = 3
"""Limit for engine restarts in a run. More deaths have a cause that restarts cannot fix."""


@dataclass(frozen=True)
class _CallWorkers:
    """Calls all engines concurrently. It is pickled and sent to the actor's ranks."""

    workers: list[Any]

    def __call__(self, call: HostCall, given: Sequence[object]) -> None:
        """Run `call(host, value)` on each engine with the matching value, and wait for all."""
        pairs = zip(self.workers, given, strict=True)
        get_all([worker.call.remote(call, value) for worker, value in pairs])


class EngineGroup:
    """All rollout engines.

    Args:
        start: starts building engine `i`. Returns the Ray worker and the pending build call.
        settings: settings of the engines. With `max_lora_rank`, sleeping engines keep the base model.
        keeps_weights: whether sleeping engines keep all weights in host memory, because no push replaces them.
        borrowed_actor: context manager that borrows the actor for a push to a restarted engine. It yields the version
            of the actor's weights, or None for the version from the last push.
    """

    def __init__(
        self,
        start: Callable[[int], tuple[Any, object]],
        *,
        num_engines: int,
        settings: EngineSettings,
        keeps_weights: bool = False,
        borrowed_actor: Callable[[], AbstractContextManager[int | None]] = nullcontext,
    ) -> None:
        self._start = start
        self._borrowed_actor = borrowed_actor
        self._actor: SampledRole | None = None
        self._takes_turns = settings.enable_sleep
        self._sync_backend = settings.sync_backend
        self._ranks_per_engine = settings.tensor_parallel_size
        self._adapter_alone = settings.max_lora_rank is not None
        # vLLM's level 1 moves weights to host memory; level 2 drops them, because the next push replaces them.
        self._sleep_level = 1 if self._adapter_alone or keeps_weights else 2
        self._keeps_weights, self._title = keeps_weights, _TITLES[settings.role]
        self._version = 0
        self._adapter: dict[str, object] | None = None
        self._restarts = 0
        self._batch = SharedBatch({}, SamplingParams(0), [])
        # Batch numbers increase over all engines and restarts, so that late calls for an old batch have no effect.
        self._num_begun = 0
        # Start all engines before waiting for the first: each needs seconds to minutes.
        started = [start(number) for number in range(num_engines)]
        self._workers = [worker for worker, _ in started]
        self._building = [building for _, building in started]

    def wait_until_built(self) -> None:
        """Wait until all engines are ready. Raises the error of an engine that failed to start."""
        for number, building in enumerate(self._building):
            try:
                ray.get(building)
            except RayTaskError as error:
                raise cause_of(error) from error
            except PROCESS_DEATHS as error:
                raise RunError(f"{self._title} {number} died during startup (", reason_of(error), ")") from error

    def connect(self, actor: SampledRole) -> None:
        """Connect the engines to the actor for weight pushes. Call it after both are built, and after every restart."""
        self._actor = actor
        link = EngineLink(
            backend=self._sync_backend,
            call_engines=_CallWorkers(self._workers),
            num_engines=len(self._workers),
            ranks_per_engine=self._ranks_per_engine,
            rendezvous=Rendezvous(*actor.group.address()),
            adapter_alone=self._adapter_alone,
        )
        actor.group.all(lambda rank: rank.connect_engines(link))

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch on all engines. Call `collect` for the responses."""
        # The next turn of an episode reuses the prefix cache, which only the previous turn's engine has.
        if sampling.continues:
            shares = same_shares(requests, self._batch)
        else:
            shares = balanced_shares(requests, len(self._workers))
        self._batch = SharedBatch(dict(enumerate(requests)), sampling, shares)
        for number, share in enumerate(shares):
            if share:
                self._ask_for_share(number)

    def add(self, requests: list[GenerationRequest]) -> None:
        """Add requests to the batch. Numbering continues."""
        batch = self._batch
        for number, added in batch.add(requests).items():
            if number not in batch.begun:
                self._ask_for_share(number)
            else:
                self._join(number, added)

    def _join(self, number: int, added: list[GenerationRequest]) -> None:
        """Send additional requests to an engine, and collect from it again if it was finished."""
        # `row=None`: engines do not need the dataset row, which can be large.
        batch, share = self._batch, [replace(request, row=None) for request in added]
        begun, first = batch.begun[number], len(batch.shares[number]) - len(share)
        self._call(number, _ADD, begun, first, share)
        if number not in batch.heard:
            self._listen(number)

    @property
    def is_generating(self) -> bool:
        """Whether the batch has open requests."""
        return bool(self._batch.calls)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return responses completed since the last call, with request numbers.

        Waits for one, at most `timeout` seconds. If an engine dies, it is restarted and repeats all of its requests
        with the same seeds; the first response to a request counts.
        """
        ready = await self._first_ready(timeout)
        batch, responses = self._batch, []
        for call in ready:
            listening = batch.calls.pop(call, None)
            # An engine that died earlier in this loop may have stopped the others, which repeat unfinished requests.
            if listening is None:
                continue
            try:
                arrivals: Arrivals = ray.get(call)
            except (*PROCESS_DEATHS, RayTaskError) as error:
                self._replace(listening.engine, error)
                continue
            responses += batch.news(listening.engine, arrivals)
            if not batch.is_over(listening, arrivals):
                self._listen(listening.engine)
        return responses

    async def _first_ready(self, timeout: float | None) -> list[Any]:
        """Wait up to `timeout` seconds for calls with responses, and return them; [] if there is none."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        # Look up the calls after each pause, because a push may have replaced them.
        while self._batch.calls:
            begin = time.monotonic()
            calls = [*self._batch.calls]
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            if ready or (end is not None and time.monotonic() >= end):
                return ready
            # A look costs time for every engine: with hundreds of engines, frequent ones would fill a core.
            await asyncio.sleep(max(pause, _PAUSE_PER_LOOK * (time.monotonic() - begin)))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return []

    def cut(self, max_tokens: int) -> None:
        """Cancel responses that exceed `max_tokens`, now or later. Shorter ones are still returned."""
        self._batch.max_tokens = max_tokens
        # Include engines that are finished: the limit also applies to requests that are added to them later.
        for number in self._batch.begun:
            self._cut(number, max_tokens)

    def _cut(self, number: int, max_tokens: int) -> None:
        begun = self._batch.begun[number]
        self._call(number, _CUT, begun, max_tokens)

    def _ask_for_share(self, number: int) -> None:
        batch = self._batch
        share = [replace(request, row=None) for request in batch.share_again(number)]
        self._num_begun += 1
        call = self._call(number, _BEGIN, self._num_begun, share, batch.sampling, batch.max_tokens)
        batch.begun[number] = self._num_begun
        batch.calls[call] = Listening(number, len(share))

    def _listen(self, number: int) -> None:
        begun, count = self._batch.begun[number], len(self._batch.shares[number])
        call = self._call(number, _COLLECT, begun, count)
        self._batch.calls[call] = Listening(number, count)

    def _replace(self, number: int, error: Exception) -> None:
        """Restart an engine that died during a batch, push the current weights, and repeat its requests."""
        # nccl and ipc groups include all engines; with shared GPUs, the actor needs the memory of the KV caches.
        if self._actor is not None and (self._takes_turns or self._sync_backend != "shm"):
            self._repeat_with(self._actor, number, error)
            return
        self._restart({number: error})
        if self._actor is not None:
            # Restart before borrowing the actor: building an engine takes long, and training can continue meanwhile.
            with self._borrowed_actor() as version, self._actor.awake():
                self.connect(self._actor)
                self._push(self._version if version is None else version, (number,))
        self._ask_for_share(number)

    def _repeat_with(self, actor: SampledRole, number: int, error: Exception) -> None:
        """Restart an engine when the push involves all engines: all stop, and repeat unfinished requests."""
        unfinished = [number, *sorted(self._batch.heard)]
        died = {number: error} | self._stop()
        # Order: the other engines sleep first, because vLLM measures free GPU memory during startup. The new engines
        # sleep before the actor wakes up, which needs the same memory.
        if self._takes_turns:
            self._sleep(other for other in range(len(self._workers)) if other not in died)
        self._restart(died)
        if self._takes_turns:
            self._sleep(died)
        with self._borrowed_actor() as version:
            actor.wake_weights()
            self.connect(actor)
            self.receive_weights(self._version if version is None else version)
            actor.sleep()
        self.wake_cache()
        # All engines start a new batch: unfinished ones below, finished ones at the next `add`.
        self._batch.begun.clear()
        for other in unfinished:
            self._ask_for_share(other)

    def _stop(self) -> dict[int, Exception]:
        """Cancel the batch on all engines and wait until they stop. Returns engines that died meanwhile."""
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
        """Allocate the KV cache, after `receive_weights` and before generating, or weights and KV cache."""
        if self._takes_turns:
            tags = None if self._keeps_weights else ["kv_cache"]
            self._all(lambda host: host.engine.wake(tags))

    def sleep(self) -> None:
        """Release GPU memory to the training roles."""
        if self._takes_turns:
            self._sleep(range(len(self._workers)))

    def _sleep(self, numbers: Iterable[int]) -> None:
        level = self._sleep_level
        self._each(numbers, lambda host: host.engine.sleep(level))

    def receive_weights(self, version: int) -> dict[str, float]:
        """Push the actor's weights to all engines. Returns metrics.

        Dead engines are restarted, and repeat their requests if a batch is in flight.
        """
        dead = self._dead()
        died = set(dead)
        # Restart before the push: an nccl or ipc push would hang without a member of the group.
        if died:
            with self._actor_aside():
                self._restart(dead)
                self._sleep(died if self._takes_turns else ())
        if died and self._actor is not None:
            self.connect(self._actor)
        begin = time.perf_counter()
        # Only the weights: the actor is still awake for the push, so the KV cache would not fit yet.
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
        """Load an adapter on all engines. Restarted engines receive it again."""
        self._revive()
        self._adapter, self._version = manifest, version
        self._each(range(len(self._workers)), lambda host: host.take_push(manifest, version))

    def shutdown(self) -> None:
        """Stop all engines and their processes."""
        ending = [self._call(number, lambda host: host.engine.shutdown()) for number in range(len(self._workers))]
        for worker, call in zip(self._workers, ending, strict=True):
            try:
                ray.get(call, timeout=30)
            except (*PROCESS_DEATHS, RayTaskError, ray.exceptions.GetTimeoutError):
                ray.kill(worker)

    def _push(self, version: int, numbers: Iterable[int]) -> tuple[PushReport, set[int]]:
        """Push to these engines. Returns the report and the engines that died and were restarted."""
        assert self._actor is not None, "the engines have no actor"
        # On all ranks, because gathering the weights is a collective. Rank 0 returns the manifest.
        report = self._actor.group.all(lambda rank: rank.push_weights(version))[0]
        manifest, died = report.manifest, dict[int, Exception]()
        # Without a manifest (nccl, ipc), the trainer ranks have already updated the engines.
        if manifest is not None:
            try:
                died = self._failures(numbers, lambda host: host.take_push(manifest, version))
                self._restart(died)
                self._each(died, lambda host: host.take_push(manifest, version))
            finally:
                # The files occupy host memory until they are removed.
                self._actor.group.all(lambda rank: rank.discard_push())
        if died:
            self.connect(self._actor)
        return report, set(died)

    def _revive(self) -> set[int]:
        """Restart dead engines and return their numbers."""
        died = self._dead()
        self._restart(died)
        return set(died)

    def _dead(self) -> dict[int, Exception]:
        """Return the dead engines with their errors."""
        return self._failures(range(len(self._workers)), lambda host: host.engine.check_alive())

    @contextmanager
    def _actor_aside(self) -> Iterator[None]:
        """Put the actor to sleep inside the block, if engines and actor share GPUs."""
        # vLLM measures free GPU memory during startup, so the actor's weights must not be on the GPU.
        if self._actor is None or not self._takes_turns:
            yield
            return
        self._actor.sleep()
        yield
        # Not in a `finally`: after an error, ranks may wait in a collective and never reply.
        self._actor.wake_weights()

    def _failures(self, numbers: Iterable[int], call: _EngineCall[object]) -> dict[int, Exception]:
        """Call these engines concurrently and return errors by engine."""
        failures: dict[int, Exception] = {}
        for number, pending in [(number, self._call(number, call)) for number in numbers]:
            try:
                ray.get(pending)
            except (*PROCESS_DEATHS, RayTaskError) as error:
                failures[number] = error
        return failures

    def _restart(self, died: Mapping[int, Exception]) -> None:
        """Replace dead engines. New engines have the initial weights, and the current adapter if any.

        Call `connect` afterwards, while the actor is not training.
        """
        for number, error in died.items():
            self._start_again(number, error)
        if self._adapter is not None:
            manifest, version = self._adapter, self._version
            self._each(died, lambda host: host.take_push(manifest, version))

    def _start_again(self, number: int, error: Exception) -> None:
        cause = getattr(error, "cause", None)
        # The engine is alive but raised an error, such as an invalid request. A restart would not help.
        if isinstance(error, RayTaskError) and not isinstance(cause, EngineDead):
            raise cause if isinstance(cause, ValueError | RuntimeError) else error
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise ProcessDied(
                f"{self._title}s died {self._restarts} times in this run, most recently engine {number} (",
                reason_of(error),
                ")",
            )
        # The Ray worker may be alive even though vLLM's engine core died; it must release the GPU and its memory.
        ray.kill(self._workers[number])
        self._workers[number], building = self._start(number)
        try:
            ray.get(building)
        except (*PROCESS_DEATHS, RayTaskError) as again:
            raise ProcessDied(
                f"{self._title} {number} died and could not be restarted (", reason_of(again), ")"
            ) from again

    def _all(self, call: _EngineCall[Result]) -> list[Result]:
        return self._each(range(len(self._workers)), call)

    def _each(self, numbers: Iterable[int], call: _EngineCall[Result]) -> list[Result]:
        pickled = PickledCall(call)
        return get_all([self._workers[number].call.remote(pickled) for number in numbers])

    def _call(self, number: int, call: Callable[..., object], *args: object) -> object:
        """Start a Ray call on an engine's host. `call` must refer only to picklable local values, not to `self`."""
        return self._workers[number].call.remote(call, *args)
