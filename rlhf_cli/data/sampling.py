"""Order of items per step, as a pure function of seed and step.

There is no iterator state to save: a resumed run computes its batches from the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np

SEED_MASK = 2**64 - 1
"""NumPy requires non-negative seeds: negative ones are taken modulo 2^64."""


def epoch_order(num_items: int, *, epoch: int, seed: int) -> np.ndarray:
    """Return a permutation of items for this epoch, int64 [num_items]."""
    # A new generator per epoch, so that any step can be computed without earlier ones.
    return np.random.default_rng([seed & SEED_MASK, epoch]).permutation(num_items)


@dataclass(frozen=True)
class StepBatches(Sequence[np.ndarray]):
    """Item indices per step: `batches[step]`, with `len(batches)` steps.

    Each epoch is a new permutation of all items. Its last batch is smaller if `batch_size` does not divide evenly, so
    that no item is dropped, repeated or carried over.
    """

    num_items: int
    batch_size: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch."""
        return -(-self.num_items // self.batch_size)

    def __len__(self) -> int:
        return self.epochs * self.steps_per_epoch

    @overload
    def __getitem__(self, step: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, step: slice) -> list[np.ndarray]: ...
    def __getitem__(self, step: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(step, slice):
            return [self[index] for index in range(*step.indices(len(self)))]
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch_size
        return _order_of(self.num_items, epoch, self.seed)[start : start + self.batch_size]


# A few entries: training and evaluation read neighboring steps of an epoch.
@lru_cache(maxsize=4)
def _order_of(num_items: int, epoch: int, seed: int) -> np.ndarray:
    order = epoch_order(num_items, epoch=epoch, seed=seed)
    # Callers share the cached array, so it must not change.
    order.setflags(write=False)
    return order
