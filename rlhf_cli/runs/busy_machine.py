"""Startup warnings for slow CPU runs: the machine is busy, or there are more processes than cores."""

import os

from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE, Layout

_COUNTS = {ENGINE: "vllm_num_engines", JUDGE: "judge_num_engines"}


def load_notice(load: float | None = None, cores: int | None = None) -> list[str]:
    """Return a warning if other programs use all cores.

    Args:
        load: load average over the last minute; by default measured here, so call it before the run adds load.
        cores: cores available to this process; by default measured here.
    """
    # With fewer free cores than threads, OpenMP threads that busy-wait for each other make steps many times slower.
    load = os.getloadavg()[0] if load is None else load
    # Containers and `taskset` limit the cores of this process, which `os.cpu_count` ignores.
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if load < cores:
        return []
    return [
        f"other programs keep this machine busy (load {load:.1f} on {cores} cores): steps can take 10 times as long; "
        "wait for them, or set OMP_NUM_THREADS to the number of free cores, at least 1"
    ]


def crowd_notice(layout: Layout, cores: float) -> list[str]:
    """Return a warning for each role with more processes than cores in the cluster."""
    counts = {role: len(layout.of(role)) for role in dict.fromkeys(seat.role for seat in layout.seats)}
    return [
        f"{role}: {count} processes on {cores:g} cores, each with a separate model, take minutes to start; lower "
        f"--{_COUNTS.get(role, f'{role}_num_gpus_per_node')}"
        for role, count in counts.items()
        if count > cores
    ]
