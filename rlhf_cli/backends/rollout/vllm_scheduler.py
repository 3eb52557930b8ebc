"""vLLM's schedulers, which end responses at stop strings besides.

vLLM looks for stop strings in the process that asked, and the engine goes on for some steps until it hears of one: how
many is chance, and with them the rounding of all others of the batch. Here a response ends at the token that completed
the string, as it does at an end of sequence. vLLM imports this in its engine core.
"""

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from rlhf_cli.backends.rollout.stop_strings import stop_strings

STOP = "rlhf_stop"
"""Entry of `SamplingParams.extra_args` with a request's stop strings."""

Update = tuple[list[int], bool]  # the new tokens of a request, whether it ends with them


class StoppingScheduler(Scheduler):
    """On a CPU a step is scheduled when the step before is done."""

    def _update_request_with_output(self, request: Request, new_token_ids: list[int], **state: object) -> Update:
        update = super()._update_request_with_output(request, new_token_ids, **state)
        return _ended_at_stop_strings(request, update, self.vllm_config)


class AsyncStoppingScheduler(AsyncScheduler):
    """On a GPU a step is scheduled while the step before runs."""

    def _update_request_with_output(self, request: Request, new_token_ids: list[int], **state: object) -> Update:
        update = super()._update_request_with_output(request, new_token_ids, **state)
        return _ended_at_stop_strings(request, update, self.vllm_config)


def _ended_at_stop_strings(request: Request, update: Update, config: VllmConfig) -> Update:
    new_token_ids, _ = update
    texts = (request.sampling_params.extra_args or {}).get(STOP)
    if not texts or not new_token_ids or request.status == RequestStatus.FINISHED_STOPPED:
        return update
    assert len(new_token_ids) == 1, "speculative decoding is off"
    model = config.model_config
    stop = stop_strings(model.model, tuple(texts), trust_remote_code=model.trust_remote_code)
    if not stop.end(request.output_token_ids[-stop.num_tokens :]):
        return update
    request.status = RequestStatus.FINISHED_STOPPED  # also at the limit of tokens
    return new_token_ids, True
