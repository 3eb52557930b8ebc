"""Hints at the start of a run on CPUs that it will be slow: its cores are busy, or too few for its processes."""

import os

from rlhf_cli.backends.cluster.placement import ENGINE, Layout


def load_notice(load: float | None = None, cores: int | None = None) -> list[str]:
    """Return a line if other programs use as many cores as there are: threads that wait for each other take turns.

    Args:
        load: runnable threads in the last minute, by default of this machine, which is asked before the run loads it.
        cores: cores that this process may use, by default all of them.
    """
    load = os.getloadavg()[0] if load is None else load
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if load < cores:
        return []
    return [
        f"other programs keep this machine busy (load {load:.1f} on {cores} cores): steps can take 10 times as long; "
        "wait for them, or set OMP_NUM_THREADS to the number of free cores, at least 1"
    ]


def crowd_notice(layout: Layout, cores: float) -> list[str]:
    """Return a line for each role with more processes than the cluster has cores."""
    counts = {role: len(layout.of(role)) for role in dict.fromkeys(seat.role for seat in layout.seats)}
    return [
        f"{role}: {count} processes on {cores:g} cores, each with a model of its own, take minutes to start; lower "
        f"--{'vllm_num_engines' if role == ENGINE else f'{role}_num_gpus_per_node'}"
        for role, count in counts.items()
        if count > cores
    ]
