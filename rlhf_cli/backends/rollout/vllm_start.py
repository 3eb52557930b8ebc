"""Startup of vLLM's AsyncLLM: environment variables, arguments, CPU KV cache size and error messages.

The engine is in `vllm_engine`.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlhf_cli.backends.cluster.placement import JUDGE
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.processes import OWNER_VARIABLE
from rlhf_cli.backends.rollout.transformers_cache import bytes_per_token, keeps_states
from rlhf_cli.backends.rollout.vllm_arguments import engine_arguments, is_eager, parsed_arguments
from rlhf_cli.environment import SPIN_COUNT
from rlhf_cli.errors import MemoryKind, OutOfMemory, RunError, Shortage, UsageError, first_line, full_memory
from rlhf_cli.models.cost import head_size, layer_configs
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.weight_files import open_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_CPU_BLOCK_TOKENS = 128
"""vLLM's default KV cache block size on a CPU, in tokens."""


def _environment(settings: EngineSettings, *, on_cpu: bool) -> dict[str, str]:
    """Return environment variables for the engine's processes."""
    variables = {
        # Ray workers have threads and may have initialized CUDA, so forked children could deadlock or fail.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
        OWNER_VARIABLE: str(os.getpid()),
    }
    # Even in eager mode, the first request otherwise compiles small functions, which takes 5 to 19 s.
    if is_eager(settings, on_cpu=on_cpu):
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if on_cpu:
        threads = settings.num_threads or len(os.sched_getaffinity(0))
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
            # By default, vLLM pins threads to cores, but training roles and other engines use the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "GOMP_SPINCOUNT": SPIN_COUNT,
        }
        # Run the worker inside the engine core. As separate processes, both busy-wait for each other on the same cores.
        if settings.tensor_parallel_size == 1:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables


def _allow_handles(settings: EngineSettings) -> None:
    """Allow vLLM to pickle CUDA IPC handles for weight pushes."""
    # Permanent, because this process serializes handles in every push. Only our processes exchange them.
    if settings.sync_backend == "ipc":
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


@contextmanager
def engine_environment(settings: EngineSettings, *, on_cpu: bool) -> Iterator[None]:
    """Set environment variables during engine startup, then restore the previous environment."""
    # Restores everything, because vLLM adds variables too, such as LD_PRELOAD, which child processes would inherit.
    _allow_handles(settings)
    before = dict(os.environ)
    os.environ.update(_environment(settings, on_cpu=on_cpu))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def started(model_path: str, settings: EngineSettings, *, on_cpu: bool) -> "AsyncLLM":
    """Start the engine. If it fails, raises RunError with vLLM's first sentence, or OutOfMemory."""
    check_model(model_path, settings, on_cpu=on_cpu)
    begin = log_size()
    try:
        return _start(model_path, settings, on_cpu=on_cpu)
    except Exception as error:
        log = log_since(begin)
        if (kind := full_memory(f"{error} {log}")) is not None:
            raise OutOfMemory(
                _shortage(kind, start_failure(error, log), model_path, settings, on_cpu=on_cpu)
            ) from error
        raise RunError(
            f"vLLM could not be started with {model_path} ({start_failure(error, log)}); "
            "see the engine's log for the cause, or use --rollout_backend transformers"
        ) from error


def check_model(model_path: str, settings: EngineSettings, *, on_cpu: bool) -> None:
    """Raise UsageError if vLLM would start with the model, but fail or misread its weights."""
    if on_cpu:
        _check_head_size(model_path, settings)
    check_tower_names(model_path, settings)


_LOG = Path("/proc/self/fd/2")
"""Log file of this process and its children. Only the log contains the cause of an engine's death."""
# Enough for the last tracebacks, without reading a large log into memory.
_LOG_BYTES = 1 << 20
_CAUSE = re.compile(r"^(?:\([^)]*\) ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): .+)$", re.MULTILINE)
"""Last line of a traceback, as Python prints it or as vLLM logs it."""


def log_size() -> int:
    """Return the log size in bytes, or 0 if stderr is not a file."""
    return _LOG.stat().st_size if _LOG.is_file() else 0


def log_since(begin: int) -> str:
    """Return the log text after offset `begin`, at most the last `_LOG_BYTES`."""
    if not _LOG.is_file():
        return ""
    with _LOG.open("rb") as log:
        log.seek(max(begin, log_size() - _LOG_BYTES))
        return log.read().decode(errors="replace")


def _shortage(kind: MemoryKind, detail: str, model_path: str, settings: EngineSettings, *, on_cpu: bool) -> Shortage:
    """Return what memory was full. On a CPU, vLLM's messages about the KV cache concern host memory."""
    where = f"while vLLM started with {model_path}"
    if on_cpu and kind == "GPU memory":
        kind = "host memory"
    fix = _memory_fix(settings) if kind == "GPU memory" else None
    return Shortage(kind, where, fix, role=settings.role, detail=detail)


def _memory_fix(settings: EngineSettings) -> str:
    """Return a fix for full GPU memory: another memory fraction, tensor parallelism, or shorter sequences."""
    share, longest = settings.gpu_memory_utilization, settings.max_model_len
    size, length = "vllm_tensor_parallel_size", "max_len"
    if settings.role == JUDGE:
        size, length = "judge_tensor_parallel_size", "judge_max_len"
    return (
        f"vLLM may use {share:g} of the GPU: raise --vllm_gpu_memory_utilization to {min(0.95, share + 0.2):.2g} if "
        f"weights or KV cache do not fit, lower it to {share / 2:.2g} if other processes use the GPU, set "
        f"--{size} {2 * settings.tensor_parallel_size}, or lower --{length} {longest}"
    )


def start_failure(error: Exception, log: str) -> str:
    """Return the reason for a failed start in one line, from the error or the log of the engine's processes."""
    # For an invalid setting, pydantic's first line is only a count of errors; vLLM's sentence is inside.
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ").partition(". ")[0]
    # vLLM raises "Engine core initialization failed" here; the process that failed has logged the cause. With tensor
    # parallelism the engine core then logs an error of its own, which only refers to the worker's.
    causes = [cause for cause in _CAUSE.findall(log) if "root cause" not in cause]
    return causes[-1] if causes else first_line(error)


def _check_head_size(model_path: str, settings: EngineSettings) -> None:
    """Raise UsageError if vLLM's CPU attention does not support the model's head size."""
    # vLLM would start and crash at the first request.
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    sizes = {head_size(layer) for layer in layer_configs(_text_config(model_path, settings))}
    if unknown := sizes.difference(known):
        raise UsageError(
            f"{model_path} has attention head size {min(unknown)}; vLLM on a CPU supports "
            f"{', '.join(map(str, known))}. Use --rollout_backend transformers, which supports any size, except with "
            "--tasks"
        )


def check_tower_names(model_path: str, settings: EngineSettings) -> None:
    """Raise UsageError if a LLaVA vision encoder has weight names that vLLM does not support.

    transformers 5 uses new names for newly created models, but vLLM supports only the names in older checkpoints.
    transformers keeps the older names when it loads and saves a model.
    """
    if settings.max_images_per_prompt is None or _config(model_path, settings).model_type != "llava":
        return
    names = [name for name in open_weights(Path(model_path)).names() if "vision_tower." in name]
    if names and not any("vision_tower.vision_model." in name for name in names):
        raise UsageError(
            f"{model_path} contains {names[0]}, but vLLM supports only names starting with vision_tower.vision_model. "
            "Rename the weights (docs/howto/vision-models.md), or use --rollout_backend transformers"
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

    given = parsed_arguments(settings.vllm_args)
    arguments = all_arguments(model_path, settings, given, on_cpu=on_cpu)
    print("vLLM starts with", json.dumps(arguments, default=str), flush=True)
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments),
        # Batch limits for offline inference, which depend on the GPU. AsyncLLM's default context gets conservative
        # ones.
        usage_context=UsageContext.LLM_CLASS,
    )


def all_arguments(
    model_path: str, settings: EngineSettings, given: Mapping[str, Any], *, on_cpu: bool
) -> dict[str, Any]:
    """Return the engine arguments for this model and machine, overridden by the user's (`given`)."""
    arguments = {**engine_arguments(model_path, settings, on_cpu=on_cpu), **given}
    if on_cpu:
        arguments = _cpu_cache(model_path, settings, arguments) | arguments
        # For recurrent states, vLLM caches prefixes only with chunked prefill, which is off on a CPU.
        arguments["enable_prefix_caching"] &= not keeps_states(_config(model_path, settings))
    return arguments


def _cpu_cache(model_path: str, settings: EngineSettings, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return `kv_blocks` for these arguments, including the user's."""
    tokens = arguments.get("block_size") or _CPU_BLOCK_TOKENS
    return kv_blocks(model_path, settings, num_sequences=arguments["max_num_seqs"], block_tokens=tokens)


def kv_blocks(
    model_path: str, settings: EngineSettings, *, num_sequences: int, block_tokens: int = _CPU_BLOCK_TOKENS
) -> dict[str, int]:
    """Return the number of KV cache blocks that all sequences can fill on a CPU; {} if it exceeds `kv_cache_gib`.

    {} also for models with convolutions or recurrent layers, for which vLLM fills `kv_cache_gib`.
    """
    # By default, vLLM allocates and clears the full size, which takes seconds per GiB on a virtual machine.
    config = _text_config(model_path, settings)
    # Blocks of attention are larger with recurrent states, which take blocks of the same pool, some per sequence.
    if keeps_states(config):
        return {}
    # One more, because vLLM reserves a null block.
    blocks = num_sequences * -(-settings.max_model_len // block_tokens) + 1
    num_bytes = blocks * block_tokens * bytes_per_token(config, DTYPES[settings.dtype])
    return {"num_gpu_blocks_override": blocks} if num_bytes <= settings.kv_cache_gib << 30 else {}
