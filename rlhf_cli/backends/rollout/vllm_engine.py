"""Rollout engine on vLLM's AsyncLLM: token in, token out, with reproducible sampling, weight pushes and sleep.

The class does not depend on Ray: a Ray actor can wrap it, and evaluation can use it in-process. Startup is in
`vllm_start`, batches are in `vllm_batch`.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlhf_cli.backends.process.killed import kernel_has_killed
from rlhf_cli.backends.rollout.engine import (
    Arrivals,
    EngineDead,
    EngineSettings,
    check_lengths,
    check_pictures,
    eos_token_ids,
)
from rlhf_cli.backends.rollout.processes import end_processes, process_tree
from rlhf_cli.backends.rollout.stop_strings import stop_strings
from rlhf_cli.backends.rollout.vllm_batch import VllmBatch
from rlhf_cli.backends.rollout.vllm_start import engine_environment, log_since, log_size, started
from rlhf_cli.backends.weight_sync.adapter_push import read_adapter, written_adapter
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import MemoryKind, OutOfMemory, RunError, Shortage, full_memory, one_line

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

# Interval for checking whether the engine's processes are alive.
_POLL_SECONDS = 0.25
_DEAD = "a vLLM engine process ended unexpectedly; see the end of the engine's log"
_ADAPTER = "policy"
"""vLLM's name for the only adapter."""
# A clean shutdown takes about 0.5 s.
_SHUTDOWN_SECONDS = 2.0
"""Timeout for vLLM's shutdown, after which the remaining processes are killed."""

Result = TypeVar("Result")


class VllmEngine:
    """A vLLM engine that serves one batch at a time.

    A batch's schedule depends only on the requests: the scheduler is paused until all are queued, the prefix cache is
    cleared first, and the KV cache has a fixed size. On a CPU, tokens and log-probs are therefore bit-identical in
    every process.
    """

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        self._settings = settings
        self._model_path = model_path
        self._eos = eos_token_ids(model_path)
        # Held by a batch while any group is open, and by sleep and wake. Acquire it before `_halting`.
        self._lock = asyncio.Lock()
        # Held by a push, and by a batch while it queues requests. Both pause the scheduler, and neither may resume it
        # for the other. A push never acquires `_lock`, so it does not wait for a batch to finish.
        self._halting = asyncio.Lock()
        self._version = 0
        # Unique request names: vLLM aborts all requests with the same name.
        self._names = map("r{}".format, itertools.count())
        self._asleep = False
        # Whether all memory was released, with nothing woken since.
        self._all_asleep = False
        self._updating = False
        # Whether the current push has paused the scheduler.
        self._is_halted = False
        # Whether the current push holds `_halting`.
        self._push_holds = False
        self._weights_lost = False
        self._adapter: LoRARequest | None = None
        self._adapter_checksum: int | None = None
        self._begun: VllmBatch | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._on_cpu = not torch.cuda.is_available()
        with engine_environment(settings, on_cpu=self._on_cpu):
            self._llm: AsyncLLM = started(model_path, settings, on_cpu=self._on_cpu)
        self._processes = process_tree(os.getpid())
        self._log_begin = log_size()

    @property
    def _takes_adapters(self) -> bool:
        return self._settings.max_lora_rank is not None

    async def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Generate one response per request, in request order.

        Raises EngineDead within a second if an engine process dies, and RunError while asleep.
        """
        batch, serving = await self._begin(requests, sampling)
        try:
            return await batch.arrivals.all(len(requests))
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    async def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch. Call `collect` for the responses. Raises RunError while asleep."""
        self._begun, _ = await self._begin(requests, sampling)

    async def add(self, requests: list[GenerationRequest]) -> None:
        """Add requests to the batch. They join the running requests and can use the prefix cache."""
        batch = self._batch
        self._serve(batch, batch.arrivals.open(len(requests)), requests, begins=False)

    async def collect(self) -> Arrivals:
        """Return responses completed since the last call. Waits for one. Raises EngineDead like `generate`."""
        return await self._batch.arrivals.collect()

    async def cut(self, max_tokens: int) -> None:
        """Cancel responses that exceed `max_tokens`, now or later."""
        self._batch.cut(max_tokens)

    @property
    def _batch(self) -> VllmBatch:
        assert self._begun is not None, "no batch was started"
        return self._begun

    async def _begin(
        self, requests: list[GenerationRequest], sampling: SamplingParams
    ) -> tuple[VllmBatch, asyncio.Task[None]]:
        """Start a batch after the current push, if any. Returns the batch and the task that runs it."""
        # The lock makes a batch wait for the end of a push instead of failing because weights are incomplete.
        async with self._halting:
            self._check_weights()
        self._check(requests, sampling)
        batch = self._new_batch(sampling)
        return batch, self._serve(batch, batch.arrivals.open(len(requests)), requests, begins=True)

    def _new_batch(self, sampling: SamplingParams) -> VllmBatch:
        return VllmBatch(
            self._llm,
            self._lock,
            sampling,
            halted=self._halted,
            names=self._names,
            eos=self._eos,
            adapter=lambda: self._adapter,
            on_cpu=self._on_cpu,
        )

    @asynccontextmanager
    async def _halted(self, clear_cache: bool) -> AsyncIterator[None]:
        """Pause the scheduler inside the block, after the current push, if any."""
        async with self._halting:
            self._check_weights()
            # "keep" freezes requests in the queue. The other modes abort them or wait for them.
            await self._llm.pause_generation(mode="keep", clear_cache=clear_cache)
            try:
                yield
            finally:
                if not self._llm.errored:
                    await self._llm.resume_generation()

    def _check_weights(self) -> None:
        if self._asleep or self._updating or self._weights_lost:
            raise RunError("the rollout engine cannot generate while asleep or with incomplete weights")

    def _check(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        check_lengths(requests, sampling, max_model_len=self._settings.max_model_len)
        check_pictures(requests, max_images=self._settings.max_images_per_prompt)
        # Load the tokenizer here first: an error inside vLLM's scheduler would kill the engine.
        if sampling.stop:
            stop_strings(self._model_path, sampling.stop, trust_remote_code=self._settings.trust_remote_code)

    def _serve(
        self, batch: VllmBatch, numbers: range, requests: list[GenerationRequest], *, begins: bool
    ) -> asyncio.Task[None]:
        """Run a group of requests in a new task."""
        task = asyncio.create_task(self._serve_part(batch, numbers, requests, begins=begins))
        # The event loop holds only weak references to tasks, so a task without another reference may be collected.
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return task

    async def _serve_part(
        self, batch: VllmBatch, numbers: range, requests: list[GenerationRequest], *, begins: bool
    ) -> None:
        try:
            if not begins:
                self._check(requests, batch.sampling)
            if requests:
                async with batch.held():
                    await self._while_alive(batch.serve(numbers, requests, begins=begins))
        # Nobody awaits this task; `collect` raises the error.
        except Exception as error:
            batch.arrivals.close(error)
        else:
            batch.arrivals.close()

    async def check_alive(self) -> None:
        """Raise EngineDead if an engine process has died."""
        if self._llm.errored:
            raise EngineDead(self._last_words())

    async def sleep(self, level: int = 2) -> None:
        """Free the KV cache. On a GPU, level 1 also moves weights to host memory; level 2 drops them."""
        # vLLM asserts that free GPU memory does not shrink during sleep. A second call frees nothing, so the assertion
        # would fail as soon as another process allocates memory.
        if self._all_asleep:
            return
        async with self._lock:
            await self._while_alive(self._llm.sleep(level=level))
        self._asleep = self._all_asleep = True
        self._weights_lost = level >= 2 and not self._on_cpu

    async def wake(self, tags: list[str] | None = None) -> None:
        """Wake "weights", "kv_cache" or, by default, both. After level 2, push weights before generating."""
        async with self._lock:
            self._all_asleep = False
            await self._control(self._llm.wake_up(tags))
            self._asleep = await self._while_alive(self._llm.is_sleeping())

    async def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Connect to the trainer. With nccl, this waits for the trainer to connect."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._while_alive(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    async def start_weight_update(self) -> None:
        """Start an update. A running batch pauses and later resumes with the new weights; a new batch waits.

        The KV cache is cleared, so that responses continue as if the new weights had read all previous tokens.
        """
        # Not a `with` block: the lock is held until `finish_weight_update` or an error.
        await self._halting.acquire()
        self._updating = self._push_holds = True
        with self._closed_on_error():
            # A sleeping engine has no running requests, and its scheduler is already paused.
            if not self._asleep:
                await self._control(self._llm.pause_generation(mode="keep", clear_cache=True))
                self._is_halted = True
            if not self._takes_adapters:
                await self._control(self._llm.start_weight_update())

    async def update_weights(self, update_info: dict[str, object]) -> None:
        """Receive a push or one chunk. For shm and adapters, pass a manifest. Raises RunError on failure."""
        with self._closed_on_error():
            if self._takes_adapters:
                await self._take_adapter(update_info)
                return
            from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

            request = WeightTransferUpdateRequest(update_info=update_info)
            await self._control(self._llm.update_weights(request))

    async def finish_weight_update(self, version: int) -> None:
        """Finish the update. Later tokens carry this version."""
        with self._closed_on_error():
            if not self._takes_adapters:
                await self._control(self._llm.finish_weight_update())
            await self._control(self._llm.update_weight_version(str(version)))
        self._version = version
        self._weights_lost = False
        await self._close_update()

    async def _close_update(self) -> None:
        self._updating = False
        try:
            if self._is_halted:
                self._is_halted = False
                await self._control(self._llm.resume_generation())
        finally:
            self._leave_halting()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Release the lock if an update fails."""
        # Otherwise, waiting batches would hang. Now they report incomplete weights, because `_updating` remains set.
        try:
            yield
        except BaseException:
            self._leave_halting()
            raise

    def _leave_halting(self) -> None:
        if self._push_holds:
            self._push_holds = False
            self._halting.release()

    async def _take_adapter(self, manifest: Mapping[str, Any]) -> None:
        """Replace the adapter for later requests. If vLLM rejects it, nothing changes.

        A push without tensors disables the adapter.
        """
        from vllm.lora.request import LoRARequest

        tensors, checksum = read_adapter(manifest)
        if not tensors:
            self._adapter, self._adapter_checksum = None, checksum
            return
        with written_adapter(tensors, manifest["config"]) as folder:
            # vLLM does not reload a known adapter ID unless `load_inplace` is set.
            request = LoRARequest(_ADAPTER, 1, folder, load_inplace=True)
            await self._control(self._llm.add_lora(request))
        # Without `load_inplace`: workers find the loaded adapter by ID and never read the folder, which is gone by now.
        self._adapter = LoRARequest(_ADAPTER, 1, folder)
        self._adapter_checksum = checksum

    async def weight_checksum(self) -> list[int]:
        """Return the last push's checksum from each worker. Equal to the sender's; empty before the first push."""
        if self._takes_adapters:
            return [] if self._adapter_checksum is None else [self._adapter_checksum]
        found = await self._while_alive(self._llm.collective_rpc("pushed_checksum"))
        return [checksum for checksum in found if checksum is not None]

    async def shutdown(self) -> None:
        """Stop the engine and all child processes. No-op on later calls."""
        llm, self._llm = self._llm, None  # type: ignore[assignment]
        # The batch also refers to vLLM's engine, which must be freed.
        self._begun = None
        if llm is not None:
            # Otherwise the handler logs the core's exit as a crash.
            if llm.output_handler is not None:
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_SECONDS)
            await asyncio.to_thread(end_processes, self._processes)

    async def _control(self, call: Awaitable[Result]) -> Result:
        try:
            return await self._while_alive(call)
        except RunError:
            raise
        # vLLM forwards a worker's exception only as text in another exception.
        except Exception as error:
            if (kind := full_memory(error)) is not None:
                raise OutOfMemory(_shortage(kind, self._settings.role, detail=one_line(error))) from error
            raise RunError(_worker_message(error)) from error

    def _last_words(self) -> str | Shortage:
        """Return the error message for a dead engine, or what memory was full."""
        kind = full_memory(log_since(self._log_begin)) or ("host memory" if kernel_has_killed() else None)
        return _DEAD if kind is None else _shortage(kind, self._settings.role)

    async def _while_alive(self, call: Awaitable[Result]) -> Result:
        """Await a call. Raises EngineDead if the engine dies meanwhile."""
        # Poll, because some of vLLM's calls never return after the engine dies.
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_POLL_SECONDS)
                if not task.done() and self._llm.errored:
                    raise EngineDead(self._last_words())
            return task.result()
        except EngineDeadError as error:
            raise EngineDead(self._last_words()) from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_POLL_SECONDS)


def _shortage(kind: MemoryKind, role: str, *, detail: str = "") -> Shortage:
    fix = "lower --vllm_gpu_memory_utilization, or set --vllm_args '{\"max_num_seqs\": 64}'"
    return Shortage(kind, "in vLLM", fix if kind == "GPU memory" else None, role=role, detail=detail)


def _worker_message(error: Exception) -> str:
    """Extract a worker's error message from vLLM's wrapper text."""
    text = str(error)
    start = text.find("weight push")
    return text[start:].split("', please")[0] if start >= 0 else f"the engine's worker failed: {text}"
