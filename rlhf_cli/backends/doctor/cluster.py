"""Check of the Ray cluster at RAY_ADDRESS."""

import sys

from rlhf_cli.backends.doctor.finding import Finding, ok
from rlhf_cli.backends.doctor.gpus import Run, run


def cluster_finding(address: str | None, run: Run = run) -> Finding:
    """Check whether the cluster responds. Without an address, each run starts Ray on this machine."""
    if not address:
        return ok("Ray", "RAY_ADDRESS is not set; each run starts Ray on this machine")
    # Through the command line in a separate process: ray.init would join the cluster, and may wait for a long time.
    if run([sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]) is not None:
        return ok("Ray", f"the cluster at {address} responds")
    cure = "ray start --head, or unset RAY_ADDRESS"
    return Finding("Ray", "error", f"no cluster responds at RAY_ADDRESS={address}", cure)
