"""vLLM schedulers that also check stop strings.

vLLM checks stop strings in the client process, so the engine continues for a random number of steps, which changes the
rounding of the other requests. Here, a response ends at the token that completes the stop string, as with EOS. vLLM
imports this module in the engine core.
"""

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
        update = super()._update_request_with_output(request, new_token_ids, is_stale)
        return _ended_at_stop_strings(request, update, self.vllm_config)


class AsyncStoppingScheduler(AsyncScheduler):
    """Asynchronous scheduler for the GPU: schedules a step while the previous one runs."""

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> _Update:
        update = super()._update_request_with_output(request, new_token_ids, is_stale)
        return _ended_at_stop_strings(request, update, self.vllm_config)


def _ended_at_stop_strings(request: Request, update: _Update, config: VllmConfig) -> _Update:
    new_token_ids, _ = update
    assert request.sampling_params is not None, "the engine only generates"
    texts = (request.sampling_params.extra_args or {}).get(STOP)
    if not texts or not new_token_ids or request.status == RequestStatus.FINISHED_STOPPED:
        return update
    # Without speculative decoding, each step adds one token, so no token after the stop string needs trimming.
    assert len(new_token_ids) == 1, "speculative decoding is not supported"
    model = config.model_config
    stop = stop_strings(model.model, tuple(texts), trust_remote_code=model.trust_remote_code)
    if not stop.end(request.output_token_ids[-stop.num_tokens :]):
        return update
    # Overrides FINISHED_LENGTH_CAPPED if the stop string ends exactly at the length limit.
    request.status = RequestStatus.FINISHED_STOPPED
    return new_token_ids, True
