"""A rank that dies while another rank computes is noticed at once and named in the error."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from rlhf_cli.backends.cluster.ray_cluster import ray_cluster
from rlhf_cli.backends.roles.worker import RayWorker
from rlhf_cli.backends.roles.worker_group import WorkerGroup
from rlhf_cli.errors import ProcessDied

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]


NOTICED_SECONDS = 30.0
"""Time limit for noticing a dead rank; it takes about a second."""


class Rank:
    """Worker object that computes for longer than the test may take."""

    def pid(self) -> int:
        return os.getpid()

    def compute(self) -> None:
        time.sleep(600)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        with ray_cluster():  # workers must be able to import this file
            yield


def test_a_dead_rank_ends_a_call_that_others_are_still_at_with_its_name_and_log(cluster, tmp_path):
    logs = [tmp_path / f"critic-{rank}.log" for rank in range(2)]
    workers = [ray.remote(RayWorker).options(num_cpus=0).remote(environment={}, log_file=log) for log in logs]
    ray.get([worker.build.remote({}, f"{__name__}:Rank") for worker in workers])
    group: WorkerGroup[Rank] = WorkerGroup("critic", workers, tmp_path)
    pids = group.all(lambda rank: rank.pid())
    computing = group.start(lambda rank: rank.compute())
    killed = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ProcessDied) as caught:
        group.wait(computing)
    assert time.monotonic() - killed < NOTICED_SECONDS
    (line,) = str(caught.value).splitlines()
    assert line.startswith("critic rank 1 died (")
    assert str(logs[1]) in line
    for worker in workers:
        ray.kill(worker)
