"""vLLM engine arguments that `rlhf` sets, with the settings to use instead.

Arguments unknown to vLLM are detected by its parser (backends/rollout/vllm_arguments.py).
"""

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

_PLACES = "Ray places the engines: --vllm_num_engines and --vllm_tensor_parallel_size set their number and size"
_TOKENS = "engines take and return token ids: --pretrain names model and tokenizer"
_SAMPLING = "give --temperature, --top_p, --top_k or --min_p"
_WORKER = "weights are pushed through this program's worker: --vllm_sync_backend chooses how"
_ADAPTER = "--lora_push adapter of the online commands has vLLM add the adapter"
_SCHEDULER = "stop strings and reproducible batches need this program's scheduler"

# vLLM would accept these, but a run would break or train on other log-probs.
DECIDED: dict[str, str] = {
    "model": "give --pretrain",
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _TOKENS),
    **dict.fromkeys(("revision", "code_revision"), "give the folder of that revision as --pretrain"),
    **dict.fromkeys(("runner", "convert"), "its engines generate, and --reward_pretrain scores"),
    "trust_remote_code": "give --trust_remote_code",
    "dtype": "give --param_dtype",
    "seed": "give --seed",
    "max_model_len": "give --max_len",
    "enforce_eager": "give --enforce_eager or --no_enforce_eager",
    "enable_prefix_caching": "give --enable_prefix_caching or --no_enable_prefix_caching",
    "enable_chunked_prefill": "it is vLLM's choice on a GPU, and on a CPU it ends the engine",
    **dict.fromkeys(("enable_lora", "max_lora_rank"), _ADAPTER),
    "limit_mm_per_prompt": "give --max_images_per_prompt",
    "mm_processor_kwargs": "engines get the trainer's pixels; give --min_pixels or --max_pixels",
    "skip_mm_profiling": "it is decided by the device",
    "enable_sleep_mode": "give --vllm_enable_sleep",
    "gpu_memory_utilization": "give --vllm_gpu_memory_utilization",
    "tensor_parallel_size": "give --vllm_tensor_parallel_size",
    "logprobs_mode": "training reads the log-probabilities of the distribution that tokens are drawn from",
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
        raise ValueError(f"{temperature:g} is too low to sample at: give 0, or at least {LOWEST_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[float, AfterValidator(_require_sampled)]
"""Temperature, or 0 for greedy sampling."""


def fault_of_vllm_args(names: Iterable[str]) -> str | None:
    """Return why these engine arguments are not allowed, or None if `rlhf` does not set them."""
    return next((f"this program sets {name}: {DECIDED[name]}" for name in names if name in DECIDED), None)
