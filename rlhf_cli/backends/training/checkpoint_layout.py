"""Layout of a saved DeepSpeed engine: the position of each parameter in the files, and which runs can resume from it.

ZeRO partitions the optimizer's flat tensors depending on stage and number of ranks. Each rank saves a layout file next
to DeepSpeed's files. This module does not import DeepSpeed, because the driver uses it to check checkpoints.
"""

import json
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

from rlhf_cli.errors import UsageError

DEEPSPEED = "deepspeed"
"""Folder with DeepSpeed's files in a saved engine."""


@dataclass(frozen=True)
class Fragment:
    """Contiguous elements of a parameter in one of the optimizer's flat tensors."""

    name: str
    # Index of the first element in the flattened parameter.
    start: int
    length: int
    # Index of the flat tensor.
    flat: int
    # Index of the first element in the flat tensor.
    offset: int


@dataclass(frozen=True)
class Shard:
    """A parameter's part on one tensor-parallel rank."""

    shape: list[int]
    # Split dimension; None if the parameter is replicated.
    dimension: int | None


@dataclass(frozen=True)
class StateLayout:
    """One rank's flat tensors, and the settings that determine DeepSpeed's partitioning."""

    zero_stage: int
    num_ranks: int
    # Class name. Optimizers store the step count in different ways.
    optimizer: str
    # Names of states that are not elementwise and cannot be partitioned again.
    uncut_states: list[str]
    fragments: list[Fragment]
    tensor_parallel_size: int = 1
    # Shards of all parameters; empty without tensor parallelism.
    shards: dict[str, Shard] = field(default_factory=dict)

    def is_cut_as(self, other: "StateLayout") -> bool:
        """Return whether DeepSpeed can load files with the other layout directly."""
        first, second = (
            (one.zero_stage, one.num_ranks, one.tensor_parallel_size, one.optimizer) for one in (self, other)
        )
        return first == second

    def described(self) -> str:
        """Describe ranks and stage for a message."""
        return _ranks_and_stage(self.num_ranks, self.zero_stage, self.tensor_parallel_size)


def write_layout(layout: StateLayout, directory: Path, *, rank: int) -> None:
    """Write a rank's layout file."""
    record = asdict(layout) | {"fragments": [astuple(fragment) for fragment in layout.fragments]}
    _file(directory, rank).write_text(json.dumps(record))


def read_layout(directory: Path, *, rank: int = 0) -> StateLayout:
    """Read a rank's layout file. Raises UsageError if there is none."""
    try:
        record = json.loads(_file(directory, rank).read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"checkpoint {directory} cannot be resumed: {_file(directory, rank).name} is missing, because an older "
            "version of rlhf wrote the checkpoint"
        ) from None
    fragments = [Fragment(*values) for values in record["fragments"]]
    shards = {name: Shard(**shard) for name, shard in record.get("shards", {}).items()}
    return StateLayout(**record | {"fragments": fragments, "shards": shards})


def continuation_notice(
    directory: Path, *, what: str, zero_stage: int, num_ranks: int, tensor_parallel_size: int = 1
) -> list[str]:
    """Return a notice if resuming requires partitioning the states again, otherwise an empty list.

    Args:
        directory: the saved engine.
        what: name of the trained model in the notice, such as "actor".
        zero_stage, num_ranks, tensor_parallel_size: settings of the resumed run.

    Raises:
        UsageError: the states cannot be partitioned again, because of the optimizer or tensor parallelism.
    """
    saved = read_layout(directory)
    own = _ranks_and_stage(num_ranks, zero_stage, tensor_parallel_size)
    if own == saved.described():
        return []
    if max(saved.tensor_parallel_size, tensor_parallel_size) > 1:
        raise UsageError(
            f"checkpoint {directory} cannot be resumed with {own}: tensor-parallel states cannot be partitioned again; "
            f"use {saved.described()}, or convert it with `rlhf merge` and start from this model"
        )
    if saved.uncut_states:
        raise UsageError(
            f"checkpoint {directory} cannot be resumed with {own}: the optimizer {saved.optimizer} has states that "
            f"cannot be partitioned again ({', '.join(saved.uncut_states)}); use {saved.described()}"
        )
    random = "" if saved.num_ranks == num_ranks else " and random numbers start from the seed"
    return [
        f"The {what} resumes with {own} from a checkpoint with {saved.described()}: sums are grouped differently"
        f"{random}, so results are equal up to rounding, not bit-identical"
    ]


def _ranks_and_stage(num_ranks: int, zero_stage: int, tensor_parallel_size: int) -> str:
    split = f" and tensor_parallel_size {tensor_parallel_size}" if tensor_parallel_size > 1 else ""
    return f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'} at ZeRO stage {zero_stage}{split}"


def _file(directory: Path, rank: int) -> Path:
    return directory / f"layout_rank{rank}.json"
