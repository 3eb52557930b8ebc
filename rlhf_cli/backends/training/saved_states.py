"""Reads master weights and optimizer states by parameter from DeepSpeed's files, for any stage and number of ranks.

Files are memory-mapped on first access, and only the required elements are read. Nothing is written, so checkpoints may
be on a read-only disk.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rlhf_cli.backends.training.checkpoint_layout import DEEPSPEED, Fragment, Shard, StateLayout, read_layout
from rlhf_cli.errors import UsageError

WHOLE = "mp_rank_00_model_states.pt"
PARTITIONED = "zero_pp_rank_0_mp_rank_00_model_states.pt"
MASTER = "master"
"""Key for the master weight, in addition to the optimizer's state names."""
StateDict = dict[str, Any]
_PARTS = "*zero_pp_rank_{}_mp_rank_{:02}_optim_states.pt"


class SavedStates:
    """Master weights and optimizer states of all trained parameters in a saved engine."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / DEEPSPEED
        first = read_layout(directory)
        # At stage 0, every rank has all states, so one file is enough.
        num_files = first.num_ranks if first.zero_stage else 1
        self._layouts = [first, *(read_layout(directory, rank=rank) for rank in range(1, num_files))]
        self._places: dict[str, list[tuple[int, Fragment]]] = {}
        for rank, layout in enumerate(self._layouts):
            for fragment in layout.fragments:
                self._places.setdefault(fragment.name, []).append((rank, fragment))
        self._size, self._shards = first.tensor_parallel_size, first.shards
        self.uncut_states = first.uncut_states
        self._flats = cache(self._open)

    @property
    def common(self) -> StateDict:
        """States that are equal on all ranks: learning rate schedule and step counts."""
        return _mapped(self._folder, PARTITIONED if self._layouts[0].zero_stage == 3 else WHOLE)

    def names(self) -> set[str]:
        """Return all parameter names."""
        return set(self._places)

    def first_state(self, names: Iterable[str]) -> StateDict:
        """Return the flat tensor state with the first updated parameter among these; {} if none was updated."""
        places = (place for name in names for place in self._places[name])
        states = (self._flats(rank).states.get(fragment.flat) for rank, fragment in places)
        return next((state for state in states if state), {})

    def buffers(self) -> StateDict:
        """Return the saved buffers by name, with tensor parallelism."""
        file = self.common
        return {name: file["module"][name] for name in file["buffer_names"] if name in file["module"]}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a parameter, with tensor parallelism."""
        shard = self._shards[name]
        lengths = enumerate(shard.shape)
        return tuple(length * (self._size if number == shard.dimension else 1) for number, length in lengths)

    def joined(self, name: str) -> torch.Tensor:
        """Assemble the full master weight of a parameter, with tensor parallelism."""
        shard = self._shards[name]
        if shard.dimension is None:
            return self._master(name, shard)
        return torch.cat([self._master(name, shard, split=index) for index in range(self._size)], shard.dimension)

    def _master(self, name: str, shard: Shard, *, split: int | None = None) -> torch.Tensor:
        flat = torch.empty(math.prod(shard.shape))
        self.fill(flat, name=name, key=MASTER, start=0, split=split)
        return flat.view(shard.shape)

    def fill(self, target: torch.Tensor, *, name: str, key: str, start: int, split: int | None = None) -> None:
        """Copy a parameter's elements, beginning at `start`, into a flat tensor.

        `key` selects the master weight or a state. If the parameter was never updated, a state is not changed. With
        tensor parallelism, `split` selects the tensor-parallel rank.
        """
        stop = start + target.numel()
        for rank, fragment in self._places[name]:
            if split is not None and rank % self._size != split:
                continue
            first, last = max(start, fragment.start), min(stop, fragment.start + fragment.length)
            source = self._flats(rank).tensor(key, fragment.flat) if first < last else None
            if source is not None:
                shift = fragment.offset - fragment.start
                target[first - start : last - start].copy_(source[first + shift : last + shift])

    def _open(self, rank: int) -> "_Flats":
        layout = self._layouts[rank]
        if layout.zero_stage == 0:
            file = _mapped(self._folder, WHOLE)
            return _Flats(_whole_masters(file, layout), base_states(file["optimizer"])["state"])
        saved = _mapped(self._folder, _PARTS.format(rank // self._size, rank % self._size))["optimizer_state_dict"]
        masters = saved["fp32_flat_groups" if layout.zero_stage == 3 else "single_partition_of_fp32_groups"]
        return _Flats(masters, base_states(saved)["state"])


def base_states(state_dict: StateDict) -> StateDict:
    """Extract the torch optimizer's state dict from the state dict of DeepSpeed's optimizer."""
    # The key depends on the ZeRO stage; in fp32 at stage 0, there is no wrapper.
    names = (name for name in ("base_optimizer_state", "optimizer_state_dict") if name in state_dict)
    name = next(names, None)
    return state_dict if name is None else state_dict[name]


@dataclass(frozen=True)
class _Flats:
    """Flat master weights in a rank's file, and optimizer states by flat tensor."""

    masters: list[torch.Tensor]
    states: dict[int, StateDict]

    def tensor(self, key: str, flat: int) -> torch.Tensor | None:
        found = self.masters[flat] if key == MASTER else self.states.get(flat, {}).get(key)
        return None if found is None else found.detach().flatten()


def _whole_masters(file: StateDict, layout: StateLayout) -> list[torch.Tensor]:
    """Return the master weights at stage 0, one per parameter: fp32 copies if the weights are bf16."""
    groups = file["optimizer"].get("fp32_groups")
    if groups is not None:
        return list(chain.from_iterable(groups))
    return [file["module"][fragment.name] for fragment in layout.fragments]


def _mapped(folder: Path, pattern: str) -> StateDict:
    """Open a file with memory mapping, so that tensors are read on access."""
    path = next(folder.glob(pattern), None)
    if path is None:
        raise UsageError(f"{folder} has no {pattern}: the checkpoint is incomplete")
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)  # type: ignore[no-any-return]
