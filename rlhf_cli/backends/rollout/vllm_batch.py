"""One batch of requests on vLLM's AsyncLLM, from the scheduler's halt to the last response.

Leaves out the settings and checks of the engine (`vllm_engine`), and the form of its prompts (`vllm_prompts`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rlhf_cli.backends.rollout.engine import RequestBatch
from rlhf_cli.backends.rollout.vllm_prompts import engine_prompt, rendered_prompts
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, joined_runs, oldest
from rlhf_cli.errors import RunError

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

_CUT_POLL_SECONDS = 0.05  # between looks at how long the responses are that may be given up
_FIRST_WEIGHTS = "default"  # vLLM's label of the weights that an engine was built with


class VllmBatch:
    """A batch, of one part that begins it and others that join it; for one event loop.

    The schedule of the part that begins depends on nothing but its requests: the scheduler is halted until all of them
    are queued. Parts that join run beside it as they come.
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
        """Args:
        lock: held while a part is served.
        halted: halts the scheduler for a block, and empties the caches if it is called with True.
        names: new names of requests.
        adapter: returns the adapter that requests have now.
        """
        self.arrivals = RequestBatch(sampling.max_new_tokens)
        self.sampling = sampling
        self._llm, self._lock, self._halted, self._names, self._eos = llm, lock, halted, names, eos
        self._adapter, self._on_cpu = adapter, on_cpu
        self._running: dict[str, RequestOutputCollector] = {}  # by vLLM's own name of a request
        self._num_holders = 0
        self._taking: asyncio.Task[bool] | None = None
        self._cutting: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the engine's lock, which the parts of a batch share."""
        self._num_holders += 1
        try:
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
        if taking is not None and not taking.cancel():  # it is done: the lock is held
            self._lock.release()

    async def serve(self, numbers: Sequence[int], requests: Sequence[GenerationRequest], *, begins: bool) -> None:
        """Return when a part has its responses. A part that begins a batch finds the prefix cache empty, unless the
        batch continues another one.
        """
        llm = self._llm
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
            if not llm.errored:
                await llm.abort(names)  # a part that was cancelled or refused
            raise
        finally:
            for queue in queues:
                self._running.pop(queue.request_id, None)
                queue.close()

    async def _deliver(self, number: int, queue: "RequestOutputCollector") -> None:
        """Add a response when it is finished, unless it was given up."""
        output: Any = await queue.get()
        if output.outputs[0].finish_reason != "abort":
            self.arrivals.add(number, _generation(output))

    def cut(self, max_tokens: int) -> None:
        """Give up the responses that have, or get, more than so many tokens."""
        self.arrivals.max_tokens = max_tokens
        self._watch_lengths()

    def _watch_lengths(self) -> None:
        """Look for responses to give up from now on, if there may be any."""
        is_watched = self._cutting is not None and not self._cutting.done()
        if self.arrivals.max_tokens < self.sampling.max_new_tokens and not is_watched:
            self._cutting = asyncio.create_task(self._give_up_long())

    async def _give_up_long(self) -> None:
        """Abort responses that got longer than the batch allows, until the batch is complete.

        On a CPU not before every other one has ended, whose rounding the abort would change otherwise.
        """
        while not self.arrivals.is_complete:
            await asyncio.sleep(_CUT_POLL_SECONDS)
            states = map(self._llm.output_processor.request_states.get, [*self._running])
            running = {state.request_id: state.detokenizer.num_output_tokens() for state in states if state}
            too_long = [name for name, length in running.items() if length > self.arrivals.max_tokens]
            if too_long and (len(too_long) == len(running) or not self._on_cpu):
                await self._llm.abort(too_long, internal=True)


def vllm_sampling(request: GenerationRequest, sampling: SamplingParams, eos: Sequence[int]) -> object:
    """Return vLLM's settings of a request."""
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    from rlhf_cli.backends.rollout.vllm_scheduler import STOP

    return VllmSampling(
        max_tokens=request.limit(sampling),
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,  # else one dict and one object for each token, which the garbage collector walks
        stop_token_ids=sorted({*eos, *sampling.end_ids}),
        ignore_eos=True,  # the list above is complete
        extra_args={STOP: list(sampling.stop)},
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _generation(output: "RequestOutput") -> Generation:
    response = output.outputs[0]
    if response.finish_reason not in ("stop", "length"):
        raise RunError(f"vLLM ended a response with {response.finish_reason!r}")
    token_ids = list(response.token_ids)
    assert response.logprobs is not None
    logprobs = sampled_logprobs(response.logprobs, token_ids)
    assert response.weight_versions is not None, "vLLM names no version of the weights"
    runs = [(_version(span.version), span.end - span.start) for span in response.weight_versions]
    return Generation(token_ids, logprobs, response.finish_reason, oldest(runs), version_runs=joined_runs(runs))


def _version(label: str) -> int:
    return 0 if label == _FIRST_WEIGHTS else int(label)


def sampled_logprobs(flat: "FlatLogprobs", token_ids: list[int]) -> list[float]:
    """Return the log-prob of each sampled token, which vLLM stores before any others of its position."""
    starts = flat.start_indices
    assert [flat.token_ids[start] for start in starts] == token_ids, "vLLM's log-probs are of other tokens"
    return [flat.logprobs[start] for start in starts]
