"""Loss weights of the targets in a pack."""

from collections.abc import Sequence

import numpy as np
import torch

WEIGHTS = "weights"
"""Column with the loss weight of each target."""


def joined_weights(sequences: Sequence[tuple[int, np.ndarray | None]]) -> torch.Tensor | None:
    """Return the weights of all targets, float32 [K], from (number of targets, weights) of each sequence.

    None if no sequence has weights; sequences without weights in the same pack have 1.
    """
    if all(weights is None for _, weights in sequences):
        return None
    found = [np.ones(count, np.float32) if weights is None else weights for count, weights in sequences]
    return torch.from_numpy(np.concatenate(found))
