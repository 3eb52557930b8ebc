"""Order of the rows: which items each step sees, a pure function of seed and step.

There is no iterator with a position to save: a resumed run asks for the batches from its step on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np

SEED_MASK = 2**64 - 1
"""NumPy's seeds are not negative: a negative one is taken modulo 2^64."""


def epoch_order(num_items: int, *, epoch: int, seed: int) -> np.ndarray:
    """Return a permutation of the items in this pass over the data, int64 [num_items]."""
    return np.random.default_rng([seed & SEED_MASK, epoch]).permutation(num_items)


@dataclass(frozen=True)
class StepBatches(Sequence[np.ndarray]):
    """Item indices of every step: `batches[step]`, `len(batches)` steps in all.

    Each epoch is a new order of all items; its last batch is smaller where `batch_size` does not divide, so that
    nothing is dropped, repeated or carried into the next epoch.
    """

    num_items: int
    batch_size: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the items."""
        return -(-self.num_items // self.batch_size)

    def epoch_of(self, step: int) -> int:
        """Return which pass over the data the step belongs to, from 0."""
        return step // self.steps_per_epoch

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


def step_batches(num_items: int, *, batch_size: int, epochs: int, seed: int) -> StepBatches:
    """Return the item indices of every step of a run; see StepBatches."""
    return StepBatches(num_items, batch_size, epochs, seed)


@lru_cache(maxsize=4)
def _order_of(num_items: int, epoch: int, seed: int) -> np.ndarray:
    order = epoch_order(num_items, epoch=epoch, seed=seed)
    order.setflags(write=False)
    return order
