"""Where the elements of each parameter lie in the files of a saved engine, and who may go on from them.

ZeRO cuts the optimizer's flat tensors at places that depend on its stage and on the number of ranks. Every rank records
its own places beside DeepSpeed's files. Imports no DeepSpeed: the process that starts a run checks checkpoints by them.
"""

import json
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

from rlhf_cli.errors import UsageError

DEEPSPEED = "deepspeed"
"""Folder of DeepSpeed's own files in a saved engine."""


@dataclass(frozen=True)
class Fragment:
    """Elements of a parameter that are next to each other in a flat tensor of the optimizer."""

    name: str
    start: int  # of the first one in the flattened parameter
    length: int
    flat: int  # the number of the flat tensor
    offset: int  # of the first one in it


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that a rank has which splits layers with others."""

    shape: list[int]
    dimension: int | None  # in which the parameter is split; None if each rank has the whole


@dataclass(frozen=True)
class StateLayout:
    """One rank's flat tensors, and the facts that decide how DeepSpeed cuts them."""

    zero_stage: int
    num_ranks: int
    optimizer: str  # the class; another one keeps its count of steps in another way
    uncut_states: list[str]  # names of states without an element for each element of the parameter
    fragments: list[Fragment]
    tensor_parallel_size: int = 1  # neighbouring ranks that split layers
    shards: dict[str, Shard] = field(default_factory=dict)  # of all parameters, if ranks split layers

    def is_cut_as(self, other: "StateLayout") -> bool:
        """Return whether DeepSpeed can load files of the other layout by itself."""
        own, others = (
            (one.zero_stage, one.num_ranks, one.tensor_parallel_size, one.optimizer) for one in (self, other)
        )
        return own == others

    def described(self) -> str:
        """Return the ranks and the stage in words."""
        return _ranks_and_stage(self.num_ranks, self.zero_stage, self.tensor_parallel_size)


def write_layout(layout: StateLayout, directory: Path, *, rank: int) -> None:
    """Write a rank's layout beside the files of its engine."""
    record = asdict(layout) | {"fragments": [astuple(fragment) for fragment in layout.fragments]}
    _file(directory, rank).write_text(json.dumps(record))


def read_layout(directory: Path, *, rank: int = 0) -> StateLayout:
    """Return what `write_layout` wrote. Raise UsageError if there is no such file."""
    try:
        record = json.loads(_file(directory, rank).read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"checkpoint {directory} cannot be continued: it has no {_file(directory, rank).name}, as an earlier "
            "version of rlhf wrote it"
        ) from None
    fragments = [Fragment(*values) for values in record["fragments"]]
    shards = {name: Shard(**shard) for name, shard in record.get("shards", {}).items()}
    return StateLayout(**record | {"fragments": fragments, "shards": shards})


def continuation_notice(
    directory: Path, *, what: str, zero_stage: int, num_ranks: int, tensor_parallel_size: int = 1
) -> list[str]:
    """Return a line if these ranks at this stage cut the states of a saved engine anew, else nothing.

    Args:
        what: the name of the trained model in the line, "actor".

    Raises:
        UsageError: the optimizer has states that cannot be cut anew, or ranks split layers.
    """
    saved = read_layout(directory)
    own = _ranks_and_stage(num_ranks, zero_stage, tensor_parallel_size)
    if own == saved.described():
        return []
    if max(saved.tensor_parallel_size, tensor_parallel_size) > 1:
        raise UsageError(
            f"checkpoint {directory} cannot be continued by {own}: states of split layers are not cut anew; go on with "
            f"{saved.described()}, or start from the model that `rlhf merge` makes of it"
        )
    if saved.uncut_states:
        raise UsageError(
            f"checkpoint {directory} cannot be continued by {own}: its optimizer {saved.optimizer} has states that "
            f"cannot be cut anew ({', '.join(saved.uncut_states)}); go on with {saved.described()}"
        )
    random = "" if saved.num_ranks == num_ranks else " and random numbers start from the seed"
    return [
        f"The {what} goes on with {own} from a checkpoint of {saved.described()}: sums are cut in another way{random}, "
        "so that numbers are equal up to rounding, not to the bit"
    ]


def _ranks_and_stage(num_ranks: int, zero_stage: int, tensor_parallel_size: int) -> str:
    split = f" and tensor_parallel_size {tensor_parallel_size}" if tensor_parallel_size > 1 else ""
    return f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'} at ZeRO stage {zero_stage}{split}"


def _file(directory: Path, rank: int) -> Path:
    return directory / f"layout_rank{rank}.json"
