"""Arrays in an object store behave as arrays, and are read once."""

import numpy as np

from rlhf_cli.data.stored_arrays import StoredArray, StoredChunk


def test_a_chunk_is_read_once_and_only_for_its_values():
    reads: list[str] = []

    def read(reference: str) -> np.ndarray:
        reads.append(reference)
        return np.arange(10, dtype=np.float32)

    chunk = StoredChunk("chunk", read)
    first, second = StoredArray(chunk, 0, 4), StoredArray(chunk, 4, 10)
    part = second[1:-2]
    assert (len(first), len(part), part.start, part.stop) == (4, 3, 5, 8)
    assert (len(second[:]), len(second[4:2]), len(second[9:])) == (6, 0, 0)
    assert reads == []
    np.testing.assert_array_equal(
        np.concatenate([first, part]), np.array([0, 1, 2, 3, 5, 6, 7], np.float32), strict=True
    )
    assert (second[-1], float(part[0])) == (9, 5.0)
    assert reads == ["chunk"]
