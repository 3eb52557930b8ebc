"""Runs of a pack as convolutions and scans read them."""

import itertools

import numpy as np
import torch

from rlhf_cli.models.sequence_parallel.parts import Runs


class MixerRuns:
    """The runs of one pack, and what each continues: nothing, or the end of its prompt.

    Positions are computed on the host, once per pack for all layers.
    """

    def __init__(self, runs: Runs) -> None:
        self._device = runs.cu_queries.device
        # On a GPU, the process waits here once per pack.
        bounds, bounds_k = (cu_seqlens.cpu().numpy() for cu_seqlens in (runs.cu_queries, runs.cu_keys))
        self.num_tokens = int(bounds[-1])
        keys = np.arange(self.num_tokens) if runs.index_U is None else runs.index_U.cpu().numpy()
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

    def _on_device(self, positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(positions.astype(np.int64)).to(self._device)
