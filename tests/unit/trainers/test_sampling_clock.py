"""The clock of asynchronous sampling."""

import pytest

from rlhf_cli.trainers.online.sampling_clock import SamplingClock


def test_the_seconds_of_sampling_waiting_and_idle_engines_add_up_between_two_looks():
    now = 10.0
    clock = SamplingClock(lambda: now)
    with clock.sampling():
        now += 4
    with clock.waiting():
        now += 1
    assert clock.metrics() == {
        "perf/sampling_seconds": 4.0,
        "perf/sampling_wait_seconds": 1.0,
        "perf/engines_idle_seconds": 1.0,
    }
    now += 2
    with clock.sampling():  # continues over two polls
        now += 3
        found = clock.metrics()
        assert (found["perf/sampling_seconds"], found["perf/engines_idle_seconds"]) == (3.0, 2.0)
        now += 5
    now += 0.5
    found = clock.metrics()
    assert (found["perf/sampling_seconds"], found["perf/engines_idle_seconds"]) == (5.0, 0.5)
    assert found["perf/sampling_wait_seconds"] == 0.0


def test_an_error_ends_its_block_of_time():
    now = 0.0
    clock = SamplingClock(lambda: now)

    def fails() -> None:
        nonlocal now
        with clock.sampling():
            now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    now += 1
    assert clock.metrics()["perf/sampling_seconds"] == 1.0
