"""Arguments for vLLM engines: defaults from this program, and `--vllm_args` from the user.

`python -m rlhf_cli.backends.rollout.vllm_arguments JSON` validates the user's arguments with vLLM's parser and fails
with a one-line error. It runs as a separate process, because importing vLLM changes environment variables.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.config.rollout import EngineConfig
from rlhf_cli.errors import RunError, UsageError, did_you_mean

_WORKER_MODULE = "rlhf_cli.backends.weight_sync.vllm_worker"
_SCHEDULER_MODULE = "rlhf_cli.backends.rollout.vllm_scheduler"
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# Exit status for an invalid argument, as in argparse.
_USAGE = 2


def engine_arguments(model_path: str, settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Build the default engine arguments, without the user's `--vllm_args`."""
    is_ahead = not on_cpu and _can_schedule_ahead(settings)
    return {
        "model": model_path,
        # Requests are token IDs. Only JSON schemas need the tokenizer, and images the processor that includes it.
        "skip_tokenizer_init": not (settings.structured_outputs or settings.max_images_per_prompt),
        "trust_remote_code": settings.trust_remote_code,
        "dtype": _DTYPES[settings.dtype],
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Inside a Ray placement group, vLLM selects the Ray executor and starts workers on GPUs of its choice.
        "distributed_executor_backend": "mp" if settings.tensor_parallel_size > 1 else None,
        "enforce_eager": is_eager(settings, on_cpu=on_cpu),
        "enable_prefix_caching": settings.enable_prefix_caching,
        # Log-probs after temperature and top-k/top-p, because the trainer's importance ratio needs the sampling
        # distribution. vLLM's default is raw_logprobs.
        "logprobs_mode": "processed_logprobs",
        # Ignore sampling defaults in the model's generation_config.json.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": f"{_WORKER_MODULE}.WorkerExtension",
        "scheduler_cls": f"{_SCHEDULER_MODULE}.{'AsyncStoppingScheduler' if is_ahead else 'StoppingScheduler'}",
        # Explicit, because it must match `scheduler_cls`.
        "async_scheduling": is_ahead,
        "weight_transfer_config": {"backend": f"rlhf_{settings.sync_backend}"},
        **({"enable_return_routed_experts": True} if settings.record_routed_experts else {}),
        **_structured_arguments(settings),
        **_adapter_arguments(settings),
        **_picture_arguments(settings, on_cpu=on_cpu),
        **_device_arguments(settings, on_cpu=on_cpu),
    }


def _can_schedule_ahead(settings: EngineSettings) -> bool:
    """Return whether vLLM can schedule a step while the previous one runs, which drafts from text do not allow."""
    speculative = settings.vllm_args.get("speculative_config")
    return not isinstance(speculative, Mapping) or speculative.get("method") not in _DRAFTS_FROM_TEXT


_DRAFTS_FROM_TEXT = ("ngram", "suffix")
"""Speculative methods that search the text so far on the host."""


def _structured_arguments(settings: EngineSettings) -> dict[str, object]:
    """Return engine arguments for requests with a JSON schema."""
    if not settings.structured_outputs:
        return {}
    # With any white space, a weak model may write it until its token limit.
    return {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


def _adapter_arguments(settings: EngineSettings) -> dict[str, object]:
    """Return engine arguments for adapter-only pushes."""
    if settings.max_lora_rank is None:
        return {}
    return {"enable_lora": True, "max_lora_rank": settings.max_lora_rank}


def _picture_arguments(settings: EngineSettings, *, on_cpu: bool) -> dict[str, object]:
    """Return engine arguments for models with a vision encoder."""
    if settings.max_images_per_prompt is None:
        return {}
    limits = {"image": settings.max_images_per_prompt, "video": 0}
    # To size the KV cache, vLLM runs the encoder on an image of maximum size. On a CPU, the cache size is fixed.
    arguments: dict[str, object] = {"limit_mm_per_prompt": limits, "skip_mm_profiling": on_cpu}
    # The limits determine only the reserved memory: requests contain images that are already resized.
    if settings.max_pixels is not None:
        size = {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels}
        arguments["mm_processor_kwargs"] = {"images_kwargs": {"size": size}}
    return arguments


def is_eager(settings: EngineSettings, *, on_cpu: bool) -> bool:
    """Return whether vLLM runs without compilation: as set, by default only on a CPU."""
    # On a CPU, compilation takes longer than many runs.
    return on_cpu if settings.enforce_eager is None else settings.enforce_eager


def _device_arguments(settings: EngineSettings, *, on_cpu: bool) -> dict[str, object]:
    """Return engine arguments that differ between CPU and GPU."""
    # On a CPU, limits for sequences and tokens per step are fixed, so that schedules are reproducible on every machine.
    # On a GPU, vLLM selects them for the card.
    if on_cpu:
        return {
            # The CPU engine crashes on chunked prefill with per-request seeds.
            "enable_chunked_prefill": False,
            # Without chunked prefill, a step must fit the longest prompt.
            "max_num_batched_tokens": max(8192, settings.max_model_len),
            "max_num_seqs": settings.max_num_seqs,
        }
    return {
        "enable_sleep_mode": settings.enable_sleep,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
    }


def check_vllm_args(config: EngineConfig, *, backend: str, on_cpu: bool, min_p: float = 0.0) -> None:
    """Raise UsageError for invalid `--vllm_args`, or if the backend is not vLLM.

    `min_p` is the sampling setting that vLLM does not support with speculative decoding.
    """
    given = config.engine_arguments
    if not given:
        return
    if backend != "vllm":
        raise UsageError(f"--vllm_args requires vLLM, not --rollout_backend {backend}")
    if "speculative_config" in given and on_cpu:
        raise UsageError(
            "--vllm_args speculative_config: vLLM on a CPU returns wrong log-probs and ignores seeds with it; remove it"
        )
    if "speculative_config" in given and min_p:
        raise UsageError(f"--vllm_args speculative_config: vLLM does not support it with --min_p {min_p:g}")
    # Names first, from vLLM's source: this takes milliseconds, while the check with vLLM's parser takes seconds.
    for name in given:
        _check_name(name, argument_names())
    check_with([sys.executable, "-m", __name__, json.dumps(given)])


def check_with(command: list[str]) -> None:
    """Run a process that checks engine arguments. If it fails, raises an error with the last output line."""
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, VLLM_LOGGING_LEVEL="ERROR"))
    reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    if done.returncode == _USAGE:
        raise UsageError(reason)
    if done.returncode:
        raise RunError(f"vLLM could not be loaded to check --vllm_args ({reason})")


def argument_names() -> set[str]:
    """Return the engine argument names of the installed vLLM."""
    # Parsed from the source code, because an import takes seconds and changes environment variables.
    spec = find_spec("vllm")
    assert spec is not None, "vLLM is not installed"
    source = Path(str(spec.origin)).with_name("engine") / "arg_utils.py"
    classes = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    ]
    fields = [line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign)]
    return {field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")}


def _check_name(name: str, known: set[str]) -> None:
    if name not in known:
        raise UsageError(f"--vllm_args: vLLM has no engine argument {name}{did_you_mean(name, sorted(known))}")


def parsed_arguments(given: Mapping[str, object]) -> dict[str, object]:
    """Parse user arguments with vLLM's command-line parser. Raises UsageError."""
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            # After the sentence, pydantic appends the input type and a URL.
            raise UsageError(f"--vllm_args: {' '.join(message.split()).partition(' [type=')[0]}")

    if not given:
        return {}
    parser = AsyncEngineArgs.add_cli_args(Parser())
    actions = {action.dest: action for action in parser._actions}
    switches: dict[str, bool] = {}
    command_line: list[str] = []
    for name, value in given.items():
        _check_name(name, set(actions))
        # A switch has no value on the command line, so `false` cannot be passed through the parser.
        if actions[name].nargs == 0:
            switches[name] = _switch(name, value)
        else:
            command_line += command_words(name, value, is_list=actions[name].nargs == "+")
    parsed = vars(parser.parse_args(command_line))
    return {name: switches[name] if name in switches else parsed[name] for name in given}


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"--vllm_args: {name} must be true or false, not {json.dumps(value)}")
    return value


def command_words(name: str, value: object, *, is_list: bool = False) -> list[str]:
    """Format an argument with a value for vLLM's command line."""
    if value is None:
        raise UsageError(f"--vllm_args: {name} has no value; remove it to use vLLM's default")
    if is_list and isinstance(value, list):
        return [f"--{name}", *map(_text, value)]
    return [f"--{name}={_text(value)}"]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def main() -> None:
    """Validate the JSON arguments from the command line."""
    try:
        parsed_arguments(json.loads(sys.argv[1]))
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(_USAGE)


if __name__ == "__main__":
    main()
