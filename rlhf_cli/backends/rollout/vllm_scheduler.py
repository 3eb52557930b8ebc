"""vLLM schedulers that also check stop strings.

vLLM checks stop strings in the client process, so the engine continues for a random number of steps, which changes the
rounding of the other requests. Here, a response ends at the token that completes the stop string, as with EOS. vLLM
imports this module in the engine core.
"""

from collections.abc import Callable
from functools import partial

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from rlhf_cli.backends.rollout.stop_strings import stop_strings

STOP = "rlhf_stop"
"""Key in `SamplingParams.extra_args` for the stop strings."""

# New tokens for a request, and whether the request is finished.
_Update = tuple[list[int], bool]


class StoppingScheduler(Scheduler):
    """Synchronous scheduler for the CPU: schedules a step after the previous one has finished."""

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> _Update:
        update = partial(super()._update_request_with_output, is_stale=is_stale)
        return _ended_at_stop_strings(update, request, new_token_ids, self.vllm_config)


class AsyncStoppingScheduler(AsyncScheduler):
    """Asynchronous scheduler for the GPU: schedules a step while the previous one runs."""

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> _Update:
        update = partial(super()._update_request_with_output, is_stale=is_stale)
        return _ended_at_stop_strings(update, request, new_token_ids, self.vllm_config)


def _ended_at_stop_strings(
    update: Callable[[Request, list[int]], _Update], request: Request, new_token_ids: list[int], config: VllmConfig
) -> _Update:
    assert request.sampling_params is not None, "the engine only generates"
    texts = (request.sampling_params.extra_args or {}).get(STOP)
    if not texts:
        return update(request, new_token_ids)
    # One by one: with speculative decoding, a step adds several tokens, and those after the stop string are dropped.
    for count, token in enumerate(new_token_ids, start=1):
        _, is_finished = update(request, [token])
        if _completes_stop_string(request, tuple(texts), config):
            # Overrides FINISHED_LENGTH_CAPPED if the stop string ends exactly at the length limit.
            request.status = RequestStatus.FINISHED_STOPPED
            is_finished = True
        if is_finished:
            return new_token_ids[:count], True
    return new_token_ids, False


def _completes_stop_string(request: Request, texts: tuple[str, ...], config: VllmConfig) -> bool:
    # The response has already ended with EOS.
    if request.status == RequestStatus.FINISHED_STOPPED:
        return False
    model = config.model_config
    stop = stop_strings(model.model, texts, trust_remote_code=model.trust_remote_code)
    return bool(stop.end(request.output_token_ids[-stop.num_tokens :]))
