"""vLLM engine arguments that `rlhf` sets, with the settings to use instead.

Arguments unknown to vLLM are detected by its parser (backends/rollout/vllm_arguments.py).
"""

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

_PLACES = "Ray places the engines; use --vllm_num_engines and --vllm_tensor_parallel_size"
_TOKENS = "engines process token ids of the trainer's tokenizer, from --pretrain"
_SAMPLING = "use --temperature, --top_p, --top_k or --min_p"
_WORKER = "weights are pushed to this program's worker; use --vllm_sync_backend"
_ADAPTER = "use --lora_push adapter in online commands"
_SCHEDULER = "stop strings and reproducible batches require this program's scheduler"

# vLLM would accept these, but a run would break or train on other log-probs.
DECIDED: dict[str, str] = {
    "model": "use --pretrain",
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _TOKENS),
    **dict.fromkeys(("revision", "code_revision"), "pass the revision's folder as --pretrain"),
    **dict.fromkeys(("runner", "convert"), "engines only generate; for scoring, use --reward_pretrain"),
    "trust_remote_code": "use --trust_remote_code",
    "dtype": "use --param_dtype",
    "seed": "use --seed",
    "max_model_len": "use --max_len",
    "enforce_eager": "use --enforce_eager or --no_enforce_eager",
    "enable_prefix_caching": "use --enable_prefix_caching or --no_enable_prefix_caching",
    "enable_chunked_prefill": "vLLM selects it on a GPU, and crashes with it on a CPU",
    **dict.fromkeys(("enable_lora", "max_lora_rank"), _ADAPTER),
    "limit_mm_per_prompt": "use --max_images_per_prompt",
    "mm_processor_kwargs": "engines receive the trainer's pixels; use --min_pixels or --max_pixels",
    "skip_mm_profiling": "it depends on the device",
    "enable_sleep_mode": "use --vllm_enable_sleep",
    "gpu_memory_utilization": "use --vllm_gpu_memory_utilization",
    "tensor_parallel_size": "use --vllm_tensor_parallel_size",
    "logprobs_mode": "training requires the log-probs of the sampling distribution",
    **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), "use --rollout_routing_replay"),
    **dict.fromkeys(("generation_config", "override_generation_config"), _SAMPLING),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "weight_transfer_config"), _WORKER),
    **dict.fromkeys(("scheduler_cls", "async_scheduling", "scheduling_policy"), _SCHEDULER),
    **dict.fromkeys(
        (
            "pipeline_parallel_size", "prefill_context_parallel_size", "distributed_executor_backend", "device_ids",
            "master_addr", "master_port", "nnodes", "node_rank", "data_parallel_size", "data_parallel_size_local",
            "data_parallel_rank", "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port",
            "data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb",
        ),
        _PLACES,
    ),
}  # fmt: skip
"""Reserved arguments, with the reason or the setting to use instead."""


LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM rejects temperatures above the maximum, and raises those below the minimum, which would differ from training."""


def _require_sampled(temperature: float) -> float:
    """Return the temperature. Raises ValueError if engines would change it."""
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"{temperature:g} is too low for sampling: use 0, or at least {LOWEST_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[float, AfterValidator(_require_sampled)]
"""Temperature, or 0 for greedy sampling."""


def fault_of_vllm_args(names: Iterable[str]) -> str | None:
    """Return why these engine arguments are not allowed, or None if `rlhf` does not set them."""
    return next((f"this program sets {name}: {DECIDED[name]}" for name in names if name in DECIDED), None)
