"""Arrays in an object store: the driver handles where they are, and reads the values only if it computes with them.

The store itself is passed in, so that this module also works without one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


class StoredChunk:
    """An array in an object store, read at most once.

    - `reference`: refers to it in the store. The store frees the array after the last reference is gone.
    - `read`: returns the array of a reference.
    """

    def __init__(self, reference: object, read: Callable[[Any], np.ndarray]) -> None:
        self.reference = reference
        self.read = read

    @cached_property
    def values(self) -> np.ndarray:
        """The array, read-only."""
        return self.read(self.reference)


@dataclass(slots=True, eq=False)  # not frozen: an iteration has hundreds of thousands, which would take twice as long
class StoredArray:
    """Elements `start` to `stop` of a chunk. A slice is a `StoredArray` too; everything else reads the values.

    Example: `np.concatenate([StoredArray(chunk, 0, 3), StoredArray(chunk, 5, 7)])` reads the chunk once and returns 5
    of its values.
    """

    chunk: StoredChunk
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            assert step == 1, "a part of a chunk is contiguous"
            return StoredArray(self.chunk, self.start + start, self.start + max(start, stop))
        return self.__array__()[key]

    # NumPy calls it with both arguments by name.
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.chunk.values[self.start : self.stop], dtype=dtype, copy=copy)


Column = np.ndarray | StoredArray
"""One value per trained token of a sequence or response, `[K]`."""
