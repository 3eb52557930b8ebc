"""The start of vLLM's AsyncLLM: environment variables, arguments, the size of a CPU's cache, and reasons of failures.

The engine that runs then is in `vllm_engine`.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.processes import OWNER_VARIABLE
from rlhf_cli.backends.rollout.transformers_cache import bytes_per_token, head_size
from rlhf_cli.backends.rollout.vllm_arguments import engine_arguments, is_eager, parsed_arguments
from rlhf_cli.environment import SPIN_COUNT
from rlhf_cli.errors import OutOfMemory, RunError, UsageError, first_line, full_memory, memory_sentence
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.weight_files import open_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_CPU_BLOCK_TOKENS = 128
"""Tokens of a block of the KV cache by vLLM's default for CPUs."""


def _environment(settings: EngineSettings, *, on_cpu: bool) -> dict[str, str]:
    """Return the variables the engine's processes need when they start."""
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
        OWNER_VARIABLE: str(os.getpid()),
    }
    if is_eager(settings, on_cpu=on_cpu):
        variables["TORCHDYNAMO_DISABLE"] = "1"  # else the first request compiles for 5-19 s all the same
    if on_cpu:
        threads = settings.num_threads or len(os.sched_getaffinity(0))
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
            # vLLM would bind its threads to cores, which roles and other engines use too
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "GOMP_SPINCOUNT": SPIN_COUNT,
        }
        if settings.tensor_parallel_size == 1:
            # the core computes by itself: with a worker of its own, both wait for each other in loops on the same cores
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables


def _allow_handles(settings: EngineSettings) -> None:
    """Let vLLM pickle CUDA handles between our own processes; for good, as this process encodes them in each push."""
    if settings.sync_backend == "ipc":
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


@contextmanager
def engine_environment(settings: EngineSettings, *, on_cpu: bool) -> Iterator[None]:
    """Set the variables while the engine starts; vLLM's own additions (LD_PRELOAD) are taken back as well."""
    _allow_handles(settings)
    before = dict(os.environ)
    os.environ.update(_environment(settings, on_cpu=on_cpu))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def cpu_probe() -> Iterator[bool]:
    import torch

    yield not torch.cuda.is_available()


def started(model_path: str, settings: EngineSettings, *, on_cpu: bool) -> Any:
    """Return the running engine; raise RunError with vLLM's first sentence if it does not start."""
    if on_cpu:
        _check_head_size(model_path, settings)
    check_tower_names(model_path, settings)
    begin = log_size()
    try:
        return _start(model_path, settings, on_cpu=on_cpu)
    except Exception as error:
        reason = _start_failure(error)
        if (kind := full_memory(f"{error} {log_since(begin)}")) is not None:
            raise OutOfMemory(
                memory_sentence(kind, f"while vLLM started with {model_path}", _memory_fix(kind, settings))
            ) from error
        raise RunError(
            f"vLLM could not be started with {model_path} ({reason}); "
            "the engine's log has the cause, --rollout_backend transformers does without vLLM"
        ) from error


LOG = Path("/proc/self/fd/2")
"""What this process and its children write: the cause of an engine's end stands only there."""
LOG_BYTES = 1 << 20


def log_size() -> int:
    """Return the bytes of this process's log; 0 if its output is no file."""
    return LOG.stat().st_size if LOG.is_file() else 0


def log_since(begin: int) -> str:
    """Return what the log of this process has got since it had so many bytes."""
    if not LOG.is_file():
        return ""
    with LOG.open("rb") as log:
        log.seek(max(begin, log_size() - LOG_BYTES))
        return log.read().decode(errors="replace")


def _memory_fix(kind: str, settings: EngineSettings) -> str | None:
    """Return what an engine without enough memory of a GPU needs: another share of it, or shorter sequences."""
    if kind != "GPU memory":
        return None
    share, longest = settings.gpu_memory_utilization, settings.max_model_len
    return (
        f"vLLM may take {share:g} of the GPU: raise --vllm_gpu_memory_utilization to {min(0.95, share + 0.2):.2g} if "
        f"its weights or cache do not fit, lower it to {share / 2:.2g} if others use the GPU, give "
        f"--vllm_tensor_parallel_size {2 * settings.tensor_parallel_size}, or lower --max_len {longest}"
    )


def _start_failure(error: Exception) -> str:
    """Return why vLLM refused to start. For a wrong setting it is vLLM's sentence, not pydantic's count of errors."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ").partition(". ")[0]
    return first_line(error)


def _check_head_size(model_path: str, settings: EngineSettings) -> None:
    """Raise UsageError where vLLM's CPU attention lacks the model's head size: it would start, and die of a request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, known = head_size(_text_config(model_path, settings)), CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise UsageError(
            f"{model_path} has attention heads of size {size}; vLLM on a CPU takes {', '.join(map(str, known))}. "
            "--rollout_backend transformers takes any"
        )


def check_tower_names(model_path: str, settings: EngineSettings) -> None:
    """Raise UsageError if the tower of a LLaVA has the names that transformers 5 gives a model that it makes anew.

    vLLM knows the names of older files alone, which transformers keeps when it loads and saves a model.
    """
    if settings.max_images_per_prompt is None or _config(model_path, settings).model_type != "llava":
        return
    names = [name for name in open_weights(Path(model_path)).names() if "vision_tower." in name]
    if names and not any("vision_tower.vision_model." in name for name in names):
        raise UsageError(
            f"{model_path} has {names[0]}, a name that vLLM does not load: it knows vision_tower.vision_model.* alone. "
            "Rename the weights (docs/howto/vision-models.md), or give --rollout_backend transformers"
        )


def _config(model_path: str, settings: EngineSettings) -> "PretrainedConfig":
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path, trust_remote_code=settings.trust_remote_code)


def _text_config(model_path: str, settings: EngineSettings) -> "PretrainedConfig":
    return _config(model_path, settings).get_text_config()


def _start(model_path: str, settings: EngineSettings, *, on_cpu: bool) -> "AsyncLLM":
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(model_path, settings, on_cpu=on_cpu) | parsed_arguments(settings.vllm_args)
    if on_cpu:
        arguments = _cpu_cache(model_path, settings, arguments) | arguments
    print("vLLM starts with", json.dumps(arguments, default=str), flush=True)
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments),
        # vLLM's limits of whole batches; an AsyncLLM otherwise gets the limits of the smallest machine
        usage_context=UsageContext.LLM_CLASS,
    )


def _cpu_cache(model_path: str, settings: EngineSettings, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return `kv_blocks` for the arguments of vLLM, of which a user may have given some."""
    tokens = arguments.get("block_size") or _CPU_BLOCK_TOKENS
    return kv_blocks(model_path, settings, num_sequences=arguments["max_num_seqs"], block_tokens=tokens)


def kv_blocks(
    model_path: str, settings: EngineSettings, *, num_sequences: int, block_tokens: int = _CPU_BLOCK_TOKENS
) -> dict[str, int]:
    """Return how many blocks of a CPU's KV cache all sequences together can fill; nothing if that is over the bound.

    vLLM takes and clears the whole bound otherwise, and a GiB of fresh memory takes seconds on a virtual machine.
    """
    config = _text_config(model_path, settings)
    blocks = num_sequences * -(-settings.max_model_len // block_tokens) + 1  # vLLM keeps one empty
    num_bytes = blocks * block_tokens * bytes_per_token(config, DTYPES[settings.dtype])
    return {"num_gpu_blocks_override": blocks} if num_bytes <= settings.kv_cache_gib << 30 else {}
