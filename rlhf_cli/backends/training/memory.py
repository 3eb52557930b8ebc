"""Out-of-memory errors that name the phase, the pack size and the flag to change.

`WorkerGroup` adds role and rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlhf_cli.errors import OutOfMemory, Shortage, full_memory, one_line


@contextmanager
def named_shortage(phase: str, module: nn.Module, micro_batch: Any) -> Iterator[None]:
    """Convert an out-of-memory error inside the block to OutOfMemory.

    Args:
        phase: what the block does, such as "training".
        module: the model.
        micro_batch: a pack, or a batch with an attribute `pack`; None for the optimizer step.
    """
    try:
        yield
    except Exception as error:
        kind = full_memory(error)
        if kind is None:
            raise
        fix = None
        if kind == "GPU memory":
            fix = _of_states() if micro_batch is None else _of_pack(module, micro_batch, trains=phase == "training")
        tokens = 0 if micro_batch is None else _num_tokens(micro_batch)
        where = f"while {phase}" + (f" on a pack of {tokens} tokens" if tokens else "")
        raise OutOfMemory(Shortage(kind, where, fix, detail=one_line(error), tokens=tokens)) from error


_peaks: dict[str, float] = {}
"""GiB by metric: in this process, the latest value of each phase, and the largest reserved memory since a report."""
_RESERVED = "memory/gpu_gib_max"


def note_peak(phase: str) -> None:
    """Record the peak of PyTorch's allocator since the last phase, as that of this phase. No-op without a GPU."""
    if not torch.cuda.is_available():
        return
    reserved = torch.cuda.max_memory_reserved() / (1 << 30)
    _peaks[_RESERVED] = max(_peaks.get(_RESERVED, 0.0), reserved)
    # Tensors only: reserved memory stays with the process after the phase that needed it.
    _peaks[f"memory/{phase}_gib_max"] = torch.cuda.max_memory_allocated() / (1 << 30)
    torch.cuda.reset_peak_memory_stats()


def peak_gpu_memory() -> dict[str, float]:
    """Return peaks in GiB, empty without a GPU.

    `memory/gpu_gib_max` is the memory that PyTorch reserved since the last call, `memory/forward_gib_max` and
    `memory/train_gib_max` the tensors in the last phase of that name. All ranks have the same names, because all ranks
    of a model run its phases.
    """
    peaks = dict(_peaks)
    _peaks.pop(_RESERVED, None)
    return peaks


def _num_tokens(micro_batch: Any) -> int:
    return int(getattr(micro_batch, "pack", micro_batch).input_ids_T.numel())


def _of_states() -> str:
    return "set --optim adamw_bf16, --adam_offload, --lora_rank, or --zero_stage 3 on multiple GPUs"


def _of_pack(module: nn.Module, micro_batch: Any, *, trains: bool) -> str:
    """Return flags that reduce activation memory: gradient checkpointing first, then half the tokens per pack."""
    pack = getattr(micro_batch, "pack", micro_batch)
    tokens = _num_tokens(micro_batch)
    recomputes = any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
    first = [] if recomputes or not trains else ["--gradient_checkpointing"]
    if pack.num_sequences > 1:
        half = max(int(pack.max_seqlen), tokens // 2)
        return f"set {' or '.join([*first, f'--train_max_tokens_per_gpu {half}'])}"
    # A single sequence cannot be split over packs.
    rest = f"--max_len {tokens // 2}, or --sequence_parallel_size 2 on two GPUs"
    return f"the pack is one sequence: set {', '.join([*first, rest])}"
