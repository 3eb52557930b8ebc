"""Moving average of trained weights, in float32 host memory.

Rank 0 stores the full average. Under ZeRO-3, each rank stores the average of its partition, and `weights` gathers them.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from rlhf_cli.backends.training import distributed

_NamedParameters = list[tuple[str, nn.Parameter]]


class WeightAverage:
    """Exponential moving average: `average = beta * average + (1 - beta) * weight`, starting at the initial weights."""

    def __init__(self, parameters: _NamedParameters, *, beta: float) -> None:
        self._parameters = parameters
        self._beta = beta
        self._averages = {name: _own_part(p).to("cpu", torch.float32, copy=True) for name, p in self._kept()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average. Call it after every optimizer step."""
        for name, parameter in self._kept():
            self._averages[name].lerp_(_own_part(parameter).to("cpu", torch.float32), 1.0 - self._beta)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full average in the parameter's dtype) on rank 0. Every rank must iterate to the end."""
        for name, parameter in self._parameters:
            if _is_partitioned(parameter):
                yield name, _put_together(self._averages[name], parameter)
            elif name in self._averages:
                yield name, self._averages[name].to(parameter.dtype)

    def num_bytes(self) -> int:
        """Return the bytes that `save` writes on all ranks."""
        return sum(4 * getattr(p, "ds_numel", p.numel()) for _, p in self._parameters)

    def save(self, directory: Path) -> None:
        """Save this rank's part."""
        if self._averages:
            torch.save(self._averages, directory / _file_name(dist.get_rank()))

    def load(self, directory: Path) -> None:
        """Load a saved average, from any ZeRO stage and number of ranks. Reads only this rank's elements."""
        parts = _parts(directory)
        for name, average in self._averages.items():
            own = average.view(-1)
            # Under ZeRO-3, partitions have equal sizes. Otherwise, only rank 0 has an average, which starts at 0.
            start = dist.get_rank() * own.numel()
            _fill(own, [part[name].view(-1) for part in parts], start=start)

    def _kept(self) -> _NamedParameters:
        """Return the parameters for which this rank stores an average."""
        return [(name, p) for name, p in self._parameters if _is_partitioned(p) or dist.get_rank() == 0]


def _file_name(rank: int | str) -> str:
    return f"average_rank{rank}.pt"


def _parts(directory: Path) -> list[dict[str, torch.Tensor]]:
    """Open the saved averages in rank order, memory-mapped."""
    num_files = len(list(directory.glob(_file_name(rank="*"))))
    paths = [directory / _file_name(rank) for rank in range(num_files)]
    return [torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in paths]


def _fill(own: torch.Tensor, parts: list[torch.Tensor], *, start: int) -> None:
    """Copy elements, beginning at `start`, from the concatenation of equal-sized parts, as far as available."""
    length = parts[0].numel()
    for rank, part in enumerate(parts):
        first, last = max(start, rank * length), min(start + own.numel(), (rank + 1) * length)
        if first < last:
            own[first - start : last - start] = part[first - rank * length : last - rank * length]


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_tensor")


def _own_part(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.ds_tensor if _is_partitioned(parameter) else parameter.detach()  # type: ignore[no-any-return]


def _put_together(own: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Gather the full tensor, with the parameter's shape and dtype, from all ranks' parts."""
    # The last part is padded.
    part = own.to(distributed.device(), parameter.dtype)
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape).cpu()  # type: ignore[attr-defined]
