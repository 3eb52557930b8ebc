"""Experts to replay in a pack."""

from collections.abc import Sequence

import numpy as np
import torch


def joined_experts(runs: Sequence[tuple[int, np.ndarray | None]]) -> torch.Tensor | None:
    """Concatenate the experts of runs of tokens, int16 [T, layers, top_k]; None if no run has any.

    Each run is given by its number of tokens and the experts of its first tokens; -1 for tokens without experts.
    """
    known = [experts for _, experts in runs if experts is not None]
    if not known:
        return None
    lengths = [length for length, _ in runs]
    joined_TLk = np.full((sum(lengths), *known[0].shape[1:]), -1, dtype=np.int16)
    for stop, (length, experts) in zip(np.cumsum(lengths), runs, strict=True):
        if experts is not None:
            joined_TLk[stop - length :][: len(experts)] = experts
    return torch.from_numpy(joined_TLk)
