"""Choice of the rollout backend, and its description for the log."""

import importlib.util

from transformers import PretrainedConfig

from rlhf_cli.backends.cluster.ray_cluster import may_have_gpus
from rlhf_cli.backends.rollout.transformers_cache import keeps_states
from rlhf_cli.config.rollout import EngineConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.mixers.layers import OWN_STATES, VLLM_CPU_STATES, WITHOUT_ENGINE, refuse_own_states


def rollout_backend(
    config: EngineConfig, architecture: PretrainedConfig | None = None, *, returns_experts: bool = False
) -> str:
    """Return the rollout backend, for a model or, before it is known, for the settings.

    "auto" selects vLLM if installed. On a CPU, it selects transformers for models with convolutions or recurrent
    layers, except those that vLLM's CPU build runs, and for routed experts, which it cannot return. Raises UsageError
    for an unsupported setting or model.
    """
    backend = config.rollout_backend
    if backend == "vllm" and not is_vllm_installed():
        raise UsageError("--rollout_backend vllm: vLLM is not installed; install rlhf-cli[vllm] (GPU) or rlhf-cli[cpu]")
    if backend == "auto":
        # Engine arguments are for vLLM only.
        is_better = architecture is None or bool(config.engine_arguments) or may_have_gpus()
        runs_there = is_better or (runs_on_vllm_cpu(architecture) and not returns_experts)
        backend = "vllm" if runs_there and is_vllm_installed() else "transformers"
    if backend != "vllm" and (config.vllm_tensor_parallel_size or 1) > 1:
        raise UsageError(f"--vllm_tensor_parallel_size requires vLLM; the {backend} rollout backend uses one device")
    if architecture is not None and backend == "transformers":
        refuse_own_states(architecture)
    if architecture is not None and backend == "vllm":
        _refuse_on_vllm(architecture)
    return backend


def runs_on_vllm_cpu(architecture: PretrainedConfig) -> bool:
    """Return whether "auto" takes vLLM for a model on a CPU."""
    runs_without_experts = architecture.model_type in VLLM_CPU_STATES and not _has_experts(architecture)
    return runs_without_experts or not keeps_states(architecture)


def _has_experts(architecture: PretrainedConfig) -> bool:
    if architecture.model_type == "nemotron_h":  # counts experts even if no layer has them
        return "moe" in architecture.layer_types
    return bool(getattr(architecture, "num_local_experts", None))


def _refuse_on_vllm(architecture: PretrainedConfig) -> None:
    kind = architecture.model_type
    if kind in WITHOUT_ENGINE:
        raise UsageError(f"no rollout engine runs models of type {kind}: vLLM does not have them")
    if may_have_gpus():
        return
    if kind in OWN_STATES:
        raise UsageError(f"no rollout engine runs models of type {kind} on a CPU: vLLM needs a GPU for them")
    if kind == "nemotron_h" and _has_experts(architecture):
        raise UsageError(
            "--rollout_backend vllm: vLLM's CPU build cannot run the experts of nemotron_h; use transformers"
        )


def is_vllm_installed() -> bool:
    # find_spec instead of an import, because importing vLLM takes seconds and changes environment variables.
    return importlib.util.find_spec("vllm") is not None


def described(config: EngineConfig, backend: str) -> str:
    """Describe the engines for the log: count, backend and the user's engine arguments."""
    added = f" with {config.vllm_args}" if config.engine_arguments else ""
    if config.rollout_backend == "auto" and backend == "transformers" and is_vllm_installed():
        added = ", because on a CPU vLLM neither runs all convolutions and recurrent layers nor returns routed experts"
    return f"{config.vllm_num_engines or 1} x {backend}{added}"
