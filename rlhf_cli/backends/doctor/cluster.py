"""Check of the Ray cluster that online commands would join."""

import sys

from rlhf_cli.backends.doctor.finding import Finding, ok
from rlhf_cli.backends.doctor.gpus import Run, run


def cluster_finding(address: str | None, run: Run = run) -> Finding:
    """Return whether the cluster at RAY_ADDRESS answers; without an address every run starts Ray by itself."""
    if not address:
        return ok("Ray", "RAY_ADDRESS is not set; every run starts Ray on this machine")
    if run([sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]) is not None:
        return ok("Ray", f"the cluster at {address} answers")
    cure = "ray start --head, or unset RAY_ADDRESS"
    return Finding("Ray", "error", f"no cluster answers at RAY_ADDRESS={address}", cure)
