"""Default layouts on a Ray cluster with two nodes that claim eight GPUs each, up to the first CUDA call.

Prints a JSON line: for each number of GPUs, whether Ray reserved all resources, and the GPUs of two of them by process.
"""

import json
import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster as NodesHere

from rlhf_cli.backends.cluster.default_layout import LayoutNeeds, fill_layout
from rlhf_cli.backends.cluster.placement import ENGINE, Layout, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import Cluster, Reservation, ray_cluster
from rlhf_cli.backends.roles.worker import RayWorker
from rlhf_cli.config.placement import LayoutSettings

ROLES = ("actor", "critic", "ref", "reward")
NODES = ([1], [2], [3], [4], [8], [8, 8])


def default_layout(node_gpus: list[int]) -> Layout:
    settings = LayoutSettings(shapes=dict.fromkeys(ROLES, (1, 1)), is_open=True)
    return plan_layout(fill_layout(settings, node_gpus=node_gpus, needs=LayoutNeeds())[0], node_gpus=node_gpus)


def is_given(layout: Layout, cluster: Cluster) -> bool:
    reservation = Reservation(layout, cluster)
    shares = [reservation.options(seat)["num_gpus"] for seat in layout.seats]
    reservation.release()
    return round(sum(shares), 3) <= layout.num_gpus  # five shares of 0.2 may add up to more than 1


def visible(layout: Layout, cluster: Cluster, folder: str) -> dict[str, list[str]]:
    """Return CUDA_VISIBLE_DEVICES of actor and engine processes, by rank."""
    reservation = Reservation(layout, cluster)
    workers = {
        role: [
            ray.remote(RayWorker)
            .options(**reservation.options(seat))
            .remote(environment={}, log_file=Path(folder) / f"{role}-{seat.rank}.log")
            for seat in layout.of(role)
        ]
        for role in ("actor", ENGINE)
    }
    found = {role: ray.get([worker.visible_gpus.remote() for worker in group]) for role, group in workers.items()}
    reservation.release()
    return found


def main(folder: str) -> None:
    nodes = NodesHere(
        initialize_head=True,
        head_node_args={"num_cpus": 8, "num_gpus": 8, "temp_dir": folder, "include_dashboard": False},
    )
    nodes.add_node(num_cpus=8, num_gpus=8)
    os.environ["RAY_ADDRESS"] = nodes.address
    with ray_cluster() as cluster:
        given = {str(counts): is_given(default_layout(counts), cluster) for counts in NODES}
        print(json.dumps({"nodes": cluster.node_gpus, "given": given, **visible(default_layout([2]), cluster, folder)}))
    nodes.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
