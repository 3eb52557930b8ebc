"""A rollout engine on vLLM's AsyncLLM: token in, token out, reproducible, with weight pushes and sleep.

Leaves out Ray and placement: the class is plain, so that an actor can wrap it and evaluation can use it in-process.
Its start is in `vllm_start`, its batches in `vllm_batch`.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

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
from rlhf_cli.backends.rollout.vllm_start import cpu_probe, engine_environment, log_since, log_size, started
from rlhf_cli.backends.weight_sync.adapter_push import read_adapter, written_adapter
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, full_memory, memory_sentence

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_POLL_SECONDS = 0.25  # between looks at whether the engine's processes still live
_DEAD = "a vLLM engine process ended unexpectedly; the engine's log has its last words"
_ADAPTER = "policy"
"""vLLM's name for the one adapter there is."""
_SHUTDOWN_SECONDS = 2.0
"""How long an engine has for its own end, which takes half a second; then Python would take its modules apart."""

Result = TypeVar("Result")


class VllmEngine:
    """One vLLM engine. Batches are served one after the other, whoever began them.

    The schedule of a batch depends on nothing but its requests: the scheduler is halted until all of them are
    queued, the prefix cache is emptied before, and the KV cache has a fixed size. On a CPU that makes tokens and
    log-probs bit-identical in every process.
    """

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        self._settings = settings
        self._model_path = model_path
        self._eos = eos_token_ids(model_path)
        self._lock = asyncio.Lock()  # held by a batch
        self._halting = asyncio.Lock()  # held by a push, and by a batch that begins, which both halt the scheduler
        self._version = 0
        self._names = map("r{}".format, itertools.count())  # of requests
        self._asleep = False
        self._all_asleep = False  # nothing was woken since
        self._updating = False
        self._is_halted = False  # by a push
        self._push_holds = False  # `_halting`
        self._weights_lost = False
        self._adapter: LoRARequest | None = None
        self._adapter_checksum: int | None = None
        self._begun: VllmBatch | None = None
        self._serving: set[asyncio.Task[None]] = set()
        with cpu_probe() as on_cpu, engine_environment(settings, on_cpu=on_cpu):
            self._on_cpu = on_cpu
            self._llm = started(model_path, settings, on_cpu=on_cpu)
        self._processes = process_tree(os.getpid())
        self._log_begin = log_size()

    @property
    def _takes_adapters(self) -> bool:
        return self._settings.max_lora_rank is not None

    async def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Return one response per request, in their order.

        Raises EngineDead within a second of the death of one of the engine's processes, RunError while asleep.
        """
        batch, serving = await self._begin(requests, sampling)
        try:
            return await batch.arrivals.all(len(requests))
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    async def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch, whose responses are to be collected. RunError while asleep."""
        self._begun, _ = await self._begin(requests, sampling)

    async def add(self, requests: list[GenerationRequest]) -> None:
        """Join requests to the batch: the scheduler takes them beside those that run, and keeps the prefix cache."""
        batch = self._batch
        self._serve(batch, batch.arrivals.open(len(requests)), requests, begins=False)

    async def collect(self) -> Arrivals:
        """Return the responses of the batch that finished since the last call; waits for one. EngineDead as of
        `generate`.
        """
        return await self._batch.arrivals.collect()

    async def cut(self, max_tokens: int) -> None:
        """Give up those responses of the batch that have, or get, more than so many tokens."""
        self._batch.cut(max_tokens)

    @property
    def _batch(self) -> VllmBatch:
        assert self._begun is not None, "no batch was begun"
        return self._begun

    async def _begin(
        self, requests: list[GenerationRequest], sampling: SamplingParams
    ) -> tuple[VllmBatch, asyncio.Task[None]]:
        """Return (the batch, the task that serves its requests), after the end of a push that is under way."""
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
        """Halt the scheduler for a block, after the end of a push that is under way."""
        async with self._halting:
            self._check_weights()
            await self._llm.pause_generation(mode="keep", clear_cache=clear_cache)
            try:
                yield
            finally:
                if not self._llm.errored:
                    await self._llm.resume_generation()

    def _check_weights(self) -> None:
        if self._asleep or self._updating or self._weights_lost:
            raise RunError("the rollout engine was asked to generate while asleep or without complete weights")

    def _check(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        check_lengths(requests, sampling, max_model_len=self._settings.max_model_len)
        check_pictures(requests, max_images=self._settings.max_images_per_prompt)
        if sampling.stop:  # a fault is found here: in the engine's core it would end the engine
            stop_strings(self._model_path, sampling.stop, trust_remote_code=self._settings.trust_remote_code)

    def _serve(
        self, batch: VllmBatch, numbers: range, requests: list[GenerationRequest], *, begins: bool
    ) -> asyncio.Task[None]:
        """Begin to serve a part of a batch; return the task that does."""
        task = asyncio.create_task(self._serve_part(batch, numbers, requests, begins=begins))
        self._serving.add(task)  # an event loop keeps no task alive
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
        except Exception as error:  # of a task: it belongs to whom collects
            batch.arrivals.close(error)
        else:
            batch.arrivals.close()

    async def check_alive(self) -> None:
        """Raise EngineDead if a process of the engine has ended."""
        if self._llm.errored:
            raise EngineDead(self._last_words())

    async def sleep(self, level: int = 2) -> None:
        """Halt the engine; on a GPU level 1 moves weights to the host and level 2 drops them. Frees the KV cache."""
        if self._all_asleep:
            return  # vLLM would look for memory that it has given back already
        async with self._lock:
            await self._while_alive(self._llm.sleep(level=level))
        self._asleep = self._all_asleep = True
        self._weights_lost = level >= 2 and not self._on_cpu

    async def wake(self, tags: list[str] | None = None) -> None:
        """Wake parts ("weights", "kv_cache") or all; after level 2 weights have to be pushed before generating."""
        async with self._lock:
            self._all_asleep = False
            await self._while_alive(self._llm.wake_up(tags))
            self._asleep = await self._while_alive(self._llm.is_sleeping())

    async def is_asleep(self) -> bool:
        """Return whether the engine sleeps, fully or in part."""
        return self._asleep

    async def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Open the connection to the trainer; blocks until the trainer has come too (nccl)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._while_alive(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    async def start_weight_update(self) -> None:
        """Open an update. A batch halts with its tokens so far and goes on with the new weights; a batch that comes
        meanwhile waits for the end.

        What was computed by the old weights is dropped: a response goes on as if the new weights had read it from its
        first token.
        """
        await self._halting.acquire()
        self._updating = self._push_holds = True
        with self._closed_on_error():
            if not self._asleep:
                await self._control(self._llm.pause_generation(mode="keep", clear_cache=True))
                self._is_halted = True
            if not self._takes_adapters:
                await self._control(self._llm.start_weight_update())

    async def update_weights(self, update_info: dict[str, object]) -> None:
        """Receive a push or a part of it: for shm and adapters a manifest. Raise RunError with the fault."""
        with self._closed_on_error():
            if self._takes_adapters:
                await self._take_adapter(update_info)
                return
            from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

            request = WeightTransferUpdateRequest(update_info=update_info)
            await self._control(self._llm.update_weights(request))

    async def finish_weight_update(self, version: int) -> None:
        """Close the update: tokens carry this version from now on."""
        with self._closed_on_error():
            if not self._takes_adapters:
                await self._control(self._llm.finish_weight_update())
            await self._control(self._llm.update_weight_version(str(version)))
        self._version = version
        self._weights_lost = False
        await self._close_update()

    async def abort_weight_update(self) -> None:
        """Close an update that failed before anything was loaded (shm); the weights are the former ones."""
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
        """Let others go on after an update that failed, who would wait for its end: they find incomplete weights."""
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
        """Replace the adapter by the push; requests have it from now on. One that vLLM refuses changes nothing.

        After a push without tensors the model answers alone.
        """
        from vllm.lora.request import LoRARequest

        tensors, checksum = read_adapter(manifest)
        if not tensors:
            self._adapter, self._adapter_checksum = None, checksum
            return
        with written_adapter(tensors, manifest["config"]) as folder:
            request = LoRARequest(_ADAPTER, 1, folder, load_inplace=True)
            await self._control(self._llm.add_lora(request))
        # Without `load_inplace`: workers find the adapter by its number and do not look for the folder again.
        self._adapter = LoRARequest(_ADAPTER, 1, folder)
        self._adapter_checksum = checksum

    @property
    def weight_version(self) -> int:
        """Version of the last push; 0 for the weights the engine was built with."""
        return self._version

    async def weight_checksum(self) -> list[int]:
        """Checksum of the last push as it arrived in each worker; equal to the sender's. Empty before the first."""
        if self._takes_adapters:
            return [] if self._adapter_checksum is None else [self._adapter_checksum]
        found = await self._while_alive(self._llm.collective_rpc("pushed_checksum"))
        return [checksum for checksum in found if checksum is not None]

    async def shutdown(self) -> None:
        """End the engine and every process it started; a second call does nothing."""
        llm, self._llm = self._llm, None
        self._begun = None  # has vLLM's engine too
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would report the end of the core as a crash
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_SECONDS)
            await asyncio.to_thread(end_processes, self._processes)

    async def _control(self, call: Awaitable[Result]) -> Result:
        try:
            return await self._while_alive(call)
        except RunError:
            raise
        except Exception as error:  # vLLM hands on a worker's exception as text
            raise RunError(_worker_message(error)) from error

    def _last_words(self) -> str:
        """Return why the engine ended, as far as its log names full memory."""
        kind = full_memory(log_since(self._log_begin)) or ("host memory" if kernel_has_killed() else None)
        fix = "lower --vllm_gpu_memory_utilization, or give --vllm_args '{\"max_num_seqs\": 64}'"
        return _DEAD if kind is None else memory_sentence(kind, "in vLLM", fix if kind == "GPU memory" else None)

    async def _while_alive(self, call: Awaitable[Result]) -> Result:
        """Return the call's result; raise EngineDead if the engine dies meanwhile, as vLLM leaves some calls waiting
        forever.
        """
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


def _worker_message(error: Exception) -> str:
    """Return the sentence inside what vLLM wraps around a worker's exception."""
    text = str(error)
    start = text.find("weight push")
    return text[start:].split("', please")[0] if start >= 0 else f"the engine's worker failed: {text}"
