"""Program that runs a multi-node Ray cluster on this machine until its standard input ends.

Prints the address as the first line. After each change, prints a JSON line with the reserved placement groups, each as
a list of node numbers.
"""

import json
import os
import sys
import threading

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table


def taken(nodes: dict[str, int]) -> list[list[int]]:
    """Return the nodes per placement group, ordered by group size."""
    groups = [group["bundles_to_node_id"] for group in placement_group_table().values() if group["state"] == "CREATED"]
    return sorted((sorted(nodes[node] for node in group.values()) for group in groups), key=len, reverse=True)


def main(folder: str, num_nodes: int, cpus_per_node: int) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": cpus_per_node, "temp_dir": folder, "include_dashboard": False},
    )
    others = [cluster.add_node(num_cpus=cpus_per_node) for _ in range(num_nodes - 1)]
    nodes = {node.node_id: number for number, node in enumerate([cluster.head_node, *others])}
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    print(cluster.address, flush=True)
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    before: list[list[int]] = []
    is_last = False
    while not is_last:
        is_last = over.wait(0.2)
        if (now := taken(nodes)) != before:
            print(json.dumps(now), flush=True)
            before = now
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
