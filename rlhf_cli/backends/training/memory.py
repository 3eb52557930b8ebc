"""Running out of memory in a step, by name: the phase, the tokens of the pack, and the flag to change.

Leaves out the role and its rank, which `WorkerGroup` adds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rlhf_cli.errors import OutOfMemory, full_memory, memory_sentence


@contextmanager
def named_shortage(phase: str, module: nn.Module, micro_batch: Any) -> Iterator[None]:
    """Raise OutOfMemory for memory that runs out within the block, which computes a micro-batch of a model.

    Args:
        micro_batch: a pack, or a batch that has one as `pack`; None for the optimizer's step.
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
        where = f"while {phase}" + ("" if micro_batch is None else f" on a pack of {_num_tokens(micro_batch)} tokens")
        raise OutOfMemory(memory_sentence(kind, where, fix)) from error


def _num_tokens(micro_batch: Any) -> int:
    return int(getattr(micro_batch, "pack", micro_batch).input_ids_T.numel())


def _of_states() -> str:
    return "give --optim adamw_bf16, --adam_offload, --lora_rank, or --zero_stage 3 on several GPUs"


def _of_pack(module: nn.Module, micro_batch: Any, *, trains: bool) -> str:
    """Return what makes the activations of a pack smaller: recomputing, then half of the tokens."""
    pack = getattr(micro_batch, "pack", micro_batch)
    tokens = _num_tokens(micro_batch)
    recomputes = any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
    first = [] if recomputes or not trains else ["--gradient_checkpointing"]
    if pack.num_sequences > 1:
        half = max(int(pack.max_seqlen), tokens // 2)
        return f"give {' or '.join([*first, f'--train_max_tokens_per_gpu {half}'])}"
    rest = f"--max_len {tokens // 2}, or --sequence_parallel_size 2 on two GPUs"
    return f"the pack is one sequence: give {', '.join([*first, rest])}"
