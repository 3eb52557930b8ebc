"""Bytes that a command keeps in /dev/shm. Containers have 64 MiB there by default."""

from rlhf_cli.backends.cluster.placement import ENGINE
from rlhf_cli.planning.workload import Workload

_MIB = 2.0**20
_CPU_RANK = 66 * _MIB
"""DeepSpeed's buffers per rank on a CPU, if there are more ranks than one."""
_GPU_RANK = 32 * _MIB
"""NCCL's buffers per rank without direct access between GPUs; an assumption, not measured."""
_MESSAGES = 240 * _MIB
"""vLLM's message queue for the processes of a tensor-parallel engine: 10 chunks of 24 MiB."""


def shared_memory(work: Workload) -> dict[str, float]:
    """Return the bytes in /dev/shm of the fullest node, by purpose."""
    ranks = sum(role.num_ranks for name, role in work.roles.items() if work.host(name) == name and role.num_ranks > 1)
    engine = work.engine
    engines = len(work.layout.of(ENGINE))
    # A push through files has all weights of the policy. By default, GPUs use other means.
    has_files = engine is not None and (not engine.has_gpus or work.config.setting("vllm_sync_backend") == "shm")
    policy = work.roles.get("actor") if has_files else None
    found = {
        "ranks": ranks / work.hardware.num_nodes * (_CPU_RANK if work.hardware.is_cpu else _GPU_RANK),
        "weight push": 0.0 if policy is None else float(policy.shape.parameters * policy.value_bytes),
        "engines": engines * _MESSAGES if engine is not None and engine.size > 1 else 0.0,
    }
    return {name: size for name, size in found.items() if size}
