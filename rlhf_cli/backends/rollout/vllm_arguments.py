"""Arguments of a vLLM engine: this program's, and a user's with `--vllm_args`.

`python -m rlhf_cli.backends.rollout.vllm_arguments JSON` lets vLLM's own parser read a user's arguments, and fails with
one sentence. It is a process of its own, because importing vLLM changes the environment of a process.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.config.rollout import EngineConfig
from rlhf_cli.errors import RunError, UsageError

_WORKER_MODULE = "rlhf_cli.backends.weight_sync.vllm_worker"
_SCHEDULER_MODULE = "rlhf_cli.backends.rollout.vllm_scheduler"
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_USAGE = 2  # status of a process that found a wrong argument


def engine_arguments(model_path: str, settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that this program starts an engine with, without the user's own."""
    return {
        "model": model_path,
        "skip_tokenizer_init": settings.max_images_per_prompt is None,  # pictures come through the model's processor
        "trust_remote_code": settings.trust_remote_code,
        "dtype": _DTYPES[settings.dtype],
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # inside a Ray placement group vLLM would start Ray workers of its own, on GPUs it chooses
        "distributed_executor_backend": "mp" if settings.tensor_parallel_size > 1 else None,
        "enforce_eager": is_eager(settings, on_cpu=on_cpu),
        "enable_prefix_caching": settings.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the model's own sampling defaults must not mix into ours
        "disable_log_stats": True,
        "worker_extension_cls": f"{_WORKER_MODULE}.WorkerExtension",
        "scheduler_cls": f"{_SCHEDULER_MODULE}.{'StoppingScheduler' if on_cpu else 'AsyncStoppingScheduler'}",
        "weight_transfer_config": {"backend": f"rlhf_{settings.sync_backend}"},
        **_adapter_arguments(settings),
        **_picture_arguments(settings, on_cpu=on_cpu),
        **_device_arguments(settings, on_cpu=on_cpu),
    }


def _adapter_arguments(settings: EngineSettings) -> dict[str, object]:
    """Return the engine arguments for adapters that are pushed apart from their model."""
    if settings.max_lora_rank is None:
        return {}
    return {"enable_lora": True, "max_lora_rank": settings.max_lora_rank}


def _picture_arguments(settings: EngineSettings, *, on_cpu: bool) -> dict[str, object]:
    """Return the engine arguments for models with a vision tower.

    vLLM reserves memory for pictures of the most pixels. On a CPU, whose cache has a fixed size, it need not run the
    tower on such a picture to measure. Pictures come in their final size, which these bounds do not change.
    """
    if settings.max_images_per_prompt is None:
        return {}
    limits = {"image": settings.max_images_per_prompt, "video": 0}
    arguments: dict[str, object] = {"limit_mm_per_prompt": limits, "skip_mm_profiling": on_cpu}
    if settings.max_pixels is not None:
        size = {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels}
        arguments["mm_processor_kwargs"] = {"images_kwargs": {"size": size}}
    return arguments


def is_eager(settings: EngineSettings, *, on_cpu: bool) -> bool:
    """Return whether vLLM does not compile: as set, else on a CPU, where compiling takes longer than many runs."""
    return on_cpu if settings.enforce_eager is None else settings.enforce_eager


def _device_arguments(settings: EngineSettings, *, on_cpu: bool) -> dict[str, object]:
    """Return the engine arguments that differ between a CPU and GPUs.

    A GPU's limits of sequences and tokens in a step are left to vLLM, which knows the card. On a CPU they are fixed,
    so that the schedule of a batch is the same everywhere.
    """
    if on_cpu:
        return {
            "async_scheduling": False,  # vLLM's own default, which the scheduler has to fit
            "enable_chunked_prefill": False,  # a chunked prefill with per-request seeds kills the CPU engine
            "max_num_batched_tokens": max(8192, settings.max_model_len),
            "max_num_seqs": settings.max_num_seqs,
        }
    return {
        "async_scheduling": True,
        "enable_sleep_mode": settings.enable_sleep,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
    }


def check_vllm_args(config: EngineConfig, *, backend: str) -> None:
    """Raise UsageError unless vLLM generates and takes the user's engine arguments.

    Names are compared with vLLM's source first, which takes a moment; importing vLLM takes seconds.
    """
    given = config.engine_arguments
    if not given:
        return
    if backend != "vllm":
        raise UsageError(f"--vllm_args needs vLLM; --rollout_backend {backend} has no such arguments")
    for name in given:
        _check_name(name, argument_names())
    check_with([sys.executable, "-m", __name__, json.dumps(given)])


def check_with(command: list[str]) -> None:
    """Run a process that checks engine arguments, and raise its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, VLLM_LOGGING_LEVEL="ERROR"))
    reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    if done.returncode == _USAGE:
        raise UsageError(reason)
    if done.returncode:
        raise RunError(f"vLLM could not be loaded to check --vllm_args ({reason})")


def argument_names() -> set[str]:
    """Return the engine arguments of the installed vLLM, read from its source."""
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
        near = get_close_matches(name, sorted(known), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"--vllm_args: vLLM has no engine argument {name}{hint}")


def parsed_arguments(given: Mapping[str, object]) -> dict[str, object]:
    """Return a user's arguments as vLLM's own parser reads them from a command line. Raises UsageError."""
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            # pydantic's message goes on with the type of the input and an address
            raise UsageError(f"--vllm_args: {' '.join(message.split()).partition(' [type=')[0]}")

    if not given:
        return {}
    parser = AsyncEngineArgs.add_cli_args(Parser())
    actions = {action.dest: action for action in parser._actions}
    switches: dict[str, bool] = {}
    words: list[str] = []
    for name, value in given.items():
        _check_name(name, set(actions))
        if actions[name].nargs == 0:
            switches[name] = _switch(name, value)
        else:
            words += _words(name, value, takes_many=actions[name].nargs == "+")
    found = vars(parser.parse_args(words))
    return {name: switches[name] if name in switches else found[name] for name in given}


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"--vllm_args: {name} must be true or false, not {json.dumps(value)}")
    return value


def _words(name: str, value: object, *, takes_many: bool) -> list[str]:
    """Return an argument with its value as words of a command line."""
    if value is None:
        raise UsageError(f"--vllm_args: {name} has no value; leave it out for vLLM's own default")
    if takes_many and isinstance(value, list):
        return [f"--{name}", *map(_text, value)]
    return [f"--{name}={_text(value)}"]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def main() -> None:
    """Check the arguments on the command line."""
    try:
        parsed_arguments(json.loads(sys.argv[1]))
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(_USAGE)


if __name__ == "__main__":
    main()
