"""Order of the rows, by epoch and step."""

import numpy as np
import pytest

from rlhf_cli.data.sampling import StepBatches, epoch_order


def test_every_item_occurs_once_in_each_epoch():
    batches = StepBatches(10, batch_size=4, epochs=3, seed=1)
    assert len(batches) == 9
    assert [batch.size for batch in batches] == [4, 4, 2] * 3
    for epoch in range(3):
        assert sorted(np.concatenate(batches[3 * epoch : 3 * epoch + 3])) == list(range(10))


def test_order_differs_between_epochs_and_seeds_and_nothing_else():
    first = epoch_order(50, epoch=0, seed=1)
    assert first.tolist() == epoch_order(50, epoch=0, seed=1).tolist()
    assert first.tolist() != epoch_order(50, epoch=1, seed=1).tolist()
    assert first.tolist() != epoch_order(50, epoch=0, seed=2).tolist()
    assert first.tolist() != list(range(50))


def test_a_step_does_not_depend_on_the_steps_asked_before():
    whole = [batch.tolist() for batch in StepBatches(23, batch_size=5, epochs=4, seed=-3)]
    resumed = StepBatches(23, batch_size=5, epochs=4, seed=-3)
    assert [resumed[step].tolist() for step in range(12, len(resumed))] == whole[12:]


def test_batch_larger_than_the_data_takes_all_of_it():
    batches = StepBatches(3, batch_size=8, epochs=2, seed=0)
    assert [sorted(batch) for batch in batches] == [[0, 1, 2]] * 2


def test_steps_outside_the_run_are_refused():
    with pytest.raises(IndexError, match="step 6 of 6"):
        StepBatches(5, batch_size=2, epochs=2, seed=0)[6]
