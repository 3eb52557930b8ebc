"""Runs of a pack as convolutions and scans read them."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.models.sequence_parallel.parts import Runs

CHUNK = 64
"""Tokens in a chunk of a scan, which pads shorter rows to it."""
LEAST_FILLED = 0.75
"""Least share of a row that holds tokens, if rows are longer than a chunk."""


@dataclass(frozen=True)
class Rows:
    """Runs of similar length as rows of a batch.

    - `index_NL`: token positions in the pack; T for padding.
    - `parents_N`: numbers of the prompts whose final states the runs begin with; None for runs that start a sequence.
    - `is_continued`: whether the runs are prompts that others continue. They are left-padded, so that the state at the
      end of a row is that of its last token.
    """

    index_NL: torch.Tensor
    parents_N: torch.Tensor | None
    is_continued: bool

    def take(self, padded_TD: torch.Tensor) -> torch.Tensor:
        """Return rows [N, L, ...] of values [T + 1, ...], of which the last is for padding."""
        return padded_TD.index_select(0, self.index_NL.flatten()).unflatten(0, self.index_NL.shape)


@dataclass(frozen=True)
class FlatRuns:
    """Runs one after another, for kernels that take the bounds of sequences.

    - `index_L`: token positions in the pack.
    - `cu_seqlens`: bounds [N + 1] of the N runs in them.
    - `cu_seqlens_cpu`: the same in host memory, from which kernels are scheduled without waiting for the GPU.
    - `parents_N`: numbers of the prompts whose final states the runs begin with, or the number of prompts for runs that
      start a sequence; None if no run continues another.
    - `is_continued`: whether the runs are prompts that others continue.
    """

    index_L: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    parents_N: torch.Tensor | None
    is_continued: bool


class MixerRuns:
    """The runs of one pack, and what each continues: nothing, or the end of its prompt.

    Positions are computed on the host, once per pack for all layers.
    """

    def __init__(self, runs: Runs, device: torch.device) -> None:
        """`runs` are in host memory; `device` is where the model computes."""
        self._device = device
        bounds, bounds_k = runs.cu_queries.numpy(), runs.cu_keys.numpy()
        self.num_tokens = int(bounds[-1])
        keys = np.arange(self.num_tokens) if runs.index_U is None else runs.index_U.numpy()
        self._own = [np.arange(first, stop) for first, stop in itertools.pairwise(bounds)]
        seen = [keys[first:stop] for first, stop in itertools.pairwise(bounds_k)]
        # A run reads its prompt, if any, then its own tokens.
        self._before = [part[: part.size - own.size] for part, own in zip(seen, self._own, strict=True)]
        self._contexts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def context(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions [S] of all runs, each after the `count` tokens before it, and where its own are [T] in them.

        Position T stands for the zeros before a sequence. Example for `count` 2 and runs of 3 and 2 tokens, of which
        the second continues the first: positions [5, 5, 0, 1, 2, 1, 2, 3, 4], own [2, 3, 4, 7, 8].
        """
        if count not in self._contexts:
            zeros = np.full(count, self.num_tokens)
            parts = zip(self._before, self._own, strict=True)
            spread = [np.concatenate([np.concatenate([zeros, before])[-count:], own]) for before, own in parts]
            # The runs before a token, itself included, have `count` more positions each.
            shift = count * np.repeat(np.arange(1, len(self._own) + 1), [own.size for own in self._own])
            kept = np.arange(self.num_tokens) + shift
            self._contexts[count] = self._on_device(np.concatenate(spread)), self._on_device(kept)
        return self._contexts[count]

    @functools.cached_property
    def _parents(self) -> dict[int, int]:
        """Numbers of the runs that continue a prompt, and of their prompts."""
        by_start = {int(own[0]): number for number, own in enumerate(self._own)}
        parents = {number: by_start[int(part[0])] for number, part in enumerate(self._before) if part.size}
        # Final states exist only at the end of a run, and prompts have no prompt of their own.
        assert all(self._before[number].size == self._own[parent].size for number, parent in parents.items())
        assert parents.keys().isdisjoint(parents.values())
        return parents

    @property
    def shares_prompts(self) -> bool:
        return bool(self._parents)

    @functools.cached_property
    def numbers_T(self) -> torch.Tensor:
        """Number of the run that each token belongs to, int32."""
        return self._on_device(np.repeat(np.arange(len(self._own)), [own.size for own in self._own])).int()

    @functools.cached_property
    def rows(self) -> list[Rows]:
        """All runs as rows. Prompts that are continued come first, numbered in order."""
        parents = self._parents
        prompts = list(self._similar(set(parents.values())))
        place = {number: index for index, number in enumerate(itertools.chain(*prompts))}
        rows = [Rows(self._index(part, at_left=True), None, is_continued=True) for part in prompts]
        for part in self._similar(set(range(len(self._own))) - parents.keys() - place.keys()):
            rows.append(Rows(self._index(part), None, is_continued=False))
        for part in self._similar(parents):
            places = self._on_device(np.array([place[parents[number]] for number in part]))
            rows.append(Rows(self._index(part), places, is_continued=False))
        return rows

    @functools.cached_property
    def flat(self) -> list[FlatRuns]:
        """Prompts that are continued, if any, and then all other runs."""
        place = {prompt: index for index, prompt in enumerate(sorted({*self._parents.values()}))}
        others = [number for number in range(len(self._own)) if number not in place]
        if not place:
            return [self._flat(others, None, is_continued=False)]
        begins = [place[self._parents[number]] if number in self._parents else len(place) for number in others]
        return [
            self._flat([*place], None, is_continued=True),
            self._flat(others, self._on_device(np.array(begins)), is_continued=False),
        ]

    def _flat(self, numbers: list[int], parents_N: torch.Tensor | None, *, is_continued: bool) -> FlatRuns:
        runs = [self._own[number] for number in numbers]
        bounds = torch.from_numpy(np.cumsum([0, *(run.size for run in runs)]))
        index_L = self._on_device(np.concatenate(runs))
        return FlatRuns(index_L, bounds.to(self._device), bounds, parents_N, is_continued)

    @functools.cached_property
    def flat_home_T(self) -> torch.Tensor:
        """Places of all tokens in the concatenated flat runs."""
        return torch.cat([part.index_L for part in self.flat]).argsort()

    @functools.cached_property
    def home_T(self) -> torch.Tensor:
        """Places of all tokens in the concatenated rows, padding included."""
        flat = torch.cat([rows.index_NL.flatten() for rows in self.rows])
        # Places of padding are written to an extra position.
        home = flat.new_empty(self.num_tokens + 1)
        home[flat] = torch.arange(flat.numel(), device=flat.device)
        return home[:-1]

    def _similar(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Yield the runs in groups, longest first, so that little is padding and scans are few."""
        left = sorted(numbers, key=lambda number: (-self._own[number].size, number))
        while left:
            longest = self._own[left[0]].size
            least = 0 if longest <= CHUNK else LEAST_FILLED * longest
            count = sum(self._own[number].size >= least for number in left)
            yield left[:count]
            left = left[count:]

    def _index(self, numbers: list[int], *, at_left: bool = False) -> torch.Tensor:
        """Return the positions of runs as rows, padded at the right or at the left."""
        index = np.full((len(numbers), max(self._own[number].size for number in numbers)), self.num_tokens)
        for row, number in zip(index, numbers, strict=True):
            own = self._own[number]
            row[row.size - own.size if at_left else 0 :][: own.size] = own
        return self._on_device(index)

    def _on_device(self, positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(positions.astype(np.int64)).to(self._device)
