"""One batch of requests on vLLM's AsyncLLM.

Settings and checks are in `vllm_engine`, prompt formats in `vllm_prompts`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

from rlhf_cli.backends.rollout.engine import RequestBatch
from rlhf_cli.backends.rollout.vllm_prompts import engine_prompt, rendered_prompts
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, joined_runs, oldest
from rlhf_cli.errors import RunError

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

# Interval for checking response lengths: short compared to a response, long compared to a decoding step.
_CUT_POLL_SECONDS = 0.05
# vLLM's version label for the initial weights.
_FIRST_WEIGHTS = "default"


class VllmBatch:
    """A batch: an initial group of requests, and groups added later. Use it in one event loop.

    The initial group's schedule depends only on the requests, because the scheduler is paused until all are queued.
    Added groups join as they arrive.
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        lock: asyncio.Lock,
        sampling: SamplingParams,
        *,
        halted: Callable[[bool], AbstractAsyncContextManager[None]],
        names: Iterator[str],
        eos: Sequence[int],
        adapter: "Callable[[], LoRARequest | None]",
        on_cpu: bool,
    ) -> None:
        """Create a batch without requests.

        Args:
            llm: vLLM's engine.
            lock: the engine's batch lock, held while a group is open.
            sampling: sampling parameters for all requests.
            halted: context manager that pauses the scheduler, and clears the caches if called with True.
            names: yields unused request names.
            eos: EOS token IDs.
            adapter: returns the current adapter.
            on_cpu: whether the engine runs on a CPU.
        """
        self.arrivals = RequestBatch(sampling.max_new_tokens)
        self.sampling = sampling
        self._llm, self._lock, self._halted, self._names, self._eos = llm, lock, halted, names, eos
        self._adapter, self._on_cpu = adapter, on_cpu
        # By internal request ID: vLLM appends a random suffix to our names.
        self._running: dict[str, RequestOutputCollector] = {}
        self._num_holders = 0
        self._taking: asyncio.Task[bool] | None = None
        self._cutting: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the engine's batch lock. All groups in this batch share it; the last one releases it."""
        self._num_holders += 1
        try:
            # One task acquires the lock for all groups. It is shielded, because canceling one group must not cancel the
            # acquisition for the others.
            if self._taking is None:
                self._taking = asyncio.create_task(self._lock.acquire())
            await asyncio.shield(self._taking)
            yield
        finally:
            self._num_holders -= 1
            if self._num_holders == 0:
                self._leave()

    def _leave(self) -> None:
        taking, self._taking = self._taking, None
        # `cancel` returns false if the task is done, which means that the lock is held.
        if taking is not None and not taking.cancel():
            self._lock.release()

    async def serve(self, numbers: Sequence[int], requests: Sequence[GenerationRequest], *, begins: bool) -> None:
        """Run a group until all responses have arrived.

        An initial group starts with an empty prefix cache, unless the batch continues the previous one.
        """
        llm = self._llm
        # Render before pausing the scheduler: image processing takes long.
        rendered = await rendered_prompts(llm.renderer, requests)
        names: list[str] = []
        queues: list[RequestOutputCollector] = []
        try:
            async with self._halted(not self.sampling.continues) if begins else nullcontext():
                for request, name in zip(requests, self._names, strict=False):
                    prompt = engine_prompt(llm.input_processor, request, rendered)
                    params = vllm_sampling(request, self.sampling, self._eos)
                    names.append(name)
                    queues.append(await llm.add_request(name, prompt, params, lora_request=self._adapter()))
                    self._running[queues[-1].request_id] = queues[-1]
            self._watch_lengths()
            await asyncio.gather(*map(self._deliver, numbers, queues))
        except BaseException:
            # Canceled or rejected: without an abort, vLLM would continue these requests. A dead engine cannot abort.
            if not llm.errored:
                await llm.abort(names)
            raise
        finally:
            for queue in queues:
                self._running.pop(queue.request_id, None)
                queue.close()

    async def _deliver(self, number: int, queue: "RequestOutputCollector") -> None:
        """Wait for a response and add it, unless it was canceled."""
        output: Any = await queue.get()
        if output.outputs[0].finish_reason != "abort":
            self.arrivals.add(number, _generation(output, self.sampling))

    def cut(self, max_tokens: int) -> None:
        """Cancel responses that exceed `max_tokens`, now or later."""
        self.arrivals.max_tokens = max_tokens
        self._watch_lengths()

    def _watch_lengths(self) -> None:
        """Start to watch response lengths, if a limit below `max_new_tokens` is set."""
        is_watched = self._cutting is not None and not self._cutting.done()
        if self.arrivals.max_tokens < self.sampling.max_new_tokens and not is_watched:
            self._cutting = asyncio.create_task(self._give_up_long())

    async def _give_up_long(self) -> None:
        """Abort responses that exceed the limit, until the batch is complete."""
        while not self.arrivals.is_complete:
            await asyncio.sleep(_CUT_POLL_SECONDS)
            # FINAL_ONLY requests report no intermediate output, so read the lengths from vLLM's output processor.
            states = map(self._llm.output_processor.request_states.get, [*self._running])
            running = {
                state.request_id: state.detokenizer.num_output_tokens()
                for state in states
                if state and state.detokenizer
            }
            too_long = [name for name, length in running.items() if length > self.arrivals.max_tokens]
            # On a CPU, runs must be reproducible: an abort at a random time would change the rounding of the remaining
            # requests, so abort only when no others are left.
            if too_long and (len(too_long) == len(running) or not self._on_cpu):
                await self._llm.abort(too_long, internal=True)


def vllm_sampling(request: GenerationRequest, sampling: SamplingParams, eos: Sequence[int]) -> "VllmSamplingParams":
    """Convert sampling parameters to vLLM's."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from rlhf_cli.backends.rollout.vllm_scheduler import STOP

    schema = request.json_schema
    structured = None if schema is None else StructuredOutputsParams(json=schema)
    return VllmSampling(
        max_tokens=request.limit(sampling),
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=request.seed,
        logprobs=0,
        # Otherwise vLLM creates a dict and an object per token, which slows down the garbage collector.
        flat_logprobs=True,
        # All EOS IDs as stop tokens, with vLLM's EOS check disabled: it knows only the IDs in the model's config.
        stop_token_ids=sorted(sampling.all_end_ids(eos)),
        ignore_eos=True,
        # For the custom scheduler; vLLM's `stop` is not exact (see `vllm_scheduler`).
        extra_args={STOP: list(sampling.stop)},
        structured_outputs=structured,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _generation(output: "RequestOutput", sampling: SamplingParams) -> Generation:
    response = output.outputs[0]
    if response.finish_reason not in ("stop", "length"):
        raise RunError(f"vLLM ended a response with {response.finish_reason!r}")
    token_ids = list(response.token_ids)
    assert response.logprobs is not None
    logprobs = sampled_logprobs(cast("FlatLogprobs", response.logprobs), token_ids)
    assert response.weight_versions is not None, "vLLM reports no weight versions"
    runs = [(_version(span.version), span.end - span.start) for span in response.weight_versions]
    return Generation(
        token_ids,
        logprobs,
        cast("Literal['stop', 'length']", response.finish_reason),
        oldest(runs),
        version_runs=joined_runs(runs),
        # vLLM returns them for all requests: for evaluations, they would fill the memory of the driver.
        routed_experts=response.routed_experts if sampling.returns_experts else None,
    )


def _version(label: str) -> int:
    return 0 if label == _FIRST_WEIGHTS else int(label)


def sampled_logprobs(flat: "FlatLogprobs", token_ids: list[int]) -> list[float]:
    """Return the log-prob for each sampled token."""
    # At each position, vLLM stores the sampled token first, then the top tokens.
    starts = flat.start_indices
    assert [flat.token_ids[start] for start in starts] == token_ids, "vLLM's log-probs are for other tokens"
    return [flat.logprobs[start] for start in starts]
