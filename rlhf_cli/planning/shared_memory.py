"""Bytes that a command keeps in /dev/shm. Containers have 64 MiB there by default."""

from rlhf_cli.backends.cluster.placement import ENGINE
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.planning.workload import Workload

_MIB = 2.0**20
_CPU_RANK = 66 * _MIB
"""DeepSpeed's buffers per rank on a CPU, if there are more ranks than one."""
_GPU_RANK = 32 * _MIB
"""NCCL's buffers per rank without direct access between GPUs; an assumption, not measured."""
_MESSAGES = 240 * _MIB
"""vLLM's message queue for the processes of a tensor-parallel engine: 10 chunks of 24 MiB."""
_TOKEN_BYTES = 17
"""Bytes in Ray's object store per token of an iteration: token ids, and columns of ranks (benchmarks/scaling.py)."""
_PIXEL_BYTES = 3
"""Bytes of an image file per pixel that the model sees, without compression; an assumption."""
_COPIES = 4
"""Copies of an image file. Forward passes and training store it, and the store reuses the memory of an iteration only
after the next one (measured in docs/benchmarks.md).
"""


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
        "Ray's objects": _ray_objects(work) if isinstance(work.config, OnlineConfig) else 0.0,
        "engines": engines * _MESSAGES if engine is not None and engine.size > 1 else 0.0,
    }
    return {name: size for name, size in found.items() if size}


def _ray_objects(work: Workload) -> float:
    """Return the bytes in Ray's object store.

    Ray's limit is 30 % of the host memory, or the size of /dev/shm, and then it writes objects to disk.
    """
    tokens, images = work.tokens, work.images
    assert isinstance(work.config, OnlineConfig)
    # Ranks read an image once, however many samples have it.
    files = work.config.rollout.rollout_batch_size * images.count * images.pixels * _PIXEL_BYTES
    return tokens.requests * (tokens.prompt + tokens.response) * _TOKEN_BYTES + _COPIES * files
