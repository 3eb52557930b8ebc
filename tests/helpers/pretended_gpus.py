"""Online commands on a Ray cluster with two nodes that claim eight GPUs each, up to the first CUDA call.

    python pretended_gpus.py CLUSTER_FOLDER MODEL ROWS [--start TITLE GPUS]...

All commands with default flags, and those of the README, are checked, planned and placed for each number of GPUs, and
Ray reserves their resources. Only the commands after `--start` start their processes. Prints a JSON line.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster as NodesHere

sys.path.append(str(Path(__file__).parents[1] / "project"))

from test_docs_parse import REPOSITORY, commands_in

from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE, Layout, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import Cluster, Reservation, ray_cluster
from rlhf_cli.backends.roles.start import Processes
from rlhf_cli.command_table import COMMANDS, ONLINE
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.options import typer_command
from rlhf_cli.planning.hardware import GPUS, Hardware
from rlhf_cli.planning.planner import make_plan
from rlhf_cli.runs.online import start_roles
from rlhf_cli.runs.online.checked_run import OnlineRun, check_run, placed_run
from rlhf_cli.runs.online.estimator import estimator_of

SHAPES = ([1], [2], [4], [8], [8, 8])
DEFAULTS = {name: [name] for name, command in COMMANDS.items() if command.panel == ONLINE}


def readme_commands() -> dict[str, list[str]]:
    """Return the arguments of all online commands in the README."""
    found = commands_in("README.md", (REPOSITORY / "README.md").read_text())
    return {f"README {words[0]}": words for _, words in found if words[0] in DEFAULTS}


def with_judge(model: str) -> dict[str, list[str]]:
    """Return the arguments of a command that starts a judge model."""
    return {"judge grpo": ["grpo", "--judge", model]}


def checked(words: Sequence[str], folder: Path, model: str, rows: str) -> OnlineRun:
    """Check a command as the program does, with this model and these rows."""
    name, *flags = words
    own = {"--pretrain": model, "--prompt_data": rows, "--reward_funcs": "gsm8k", "--output": str(folder / "run")}
    own |= {"--teacher_pretrain": model} if name == "gkd" else {}
    kept = [word for flag, word in zip([None, *flags], flags, strict=False) if word not in own and flag not in own]
    found: list[Any] = []
    arguments = [*kept, *(word for pair in own.items() for word in pair)]
    typer_command(name, COMMANDS[name].config_class, found.append).main(arguments, standalone_mode=False)
    return check_run(found[0], estimator_of(found[0]))


def placements(run: OnlineRun, cluster: Cluster, folder: Path) -> Iterator[dict[str, Any]]:
    """Reserve the command's layout for each number of GPUs; yield what it received."""
    for node_gpus in SHAPES:
        placed, layout = on_gpus(run, node_gpus)
        reservation = Reservation(layout, cluster)
        processes = Processes(cluster, reservation, folder)
        plans = [start_roles.role_plan(placed.config, run.models, role, **lasts(placed)) for role in run.models.by_role]
        engines = start_roles._engine_plan(placed.config, run.models.policy, run.backend, processes)
        shares = [reservation.options(seat)["num_gpus"] for seat in layout.seats]
        reservation.release()
        yield {
            "gpus": node_gpus,
            "used": layout.num_gpus,
            "nodes": sorted({island.node for island in layout.islands}),
            "ranks": {plan.role.name: len(layout.of(plan.role.name)) for plan in plans},
            "engines": len(layout.of(ENGINE)),
            "judges": len(layout.of(JUDGE)),
            "sleeps": engines.settings.enable_sleep,
            "sync": engines.settings.sync_backend,
            # Five shares of 0.2 may add up to more than 1.
            "as_planned": is_planned(run, placed, layout, node_gpus),
            "given": round(sum(shares), 3) <= layout.num_gpus,
        }


def h100s(node_gpus: list[int]) -> Hardware:
    return replace(GPUS["h100"], num_gpus=max(node_gpus), num_nodes=len(node_gpus))


def is_planned(run: OnlineRun, placed: OnlineRun, layout: Layout, node_gpus: list[int]) -> bool:
    """Return whether `rlhf plan` has the same layout for the same reason, and a resumed run too."""
    again, same = on_gpus(run, node_gpus)
    plan = make_plan(run.config, PlanConfig(), h100s(node_gpus), has_critic=run.models.critic is not None)
    of_plan = plan.work.layout, plan.work.reason
    return of_plan == (layout, placed.layout_reason) == (same, again.layout_reason)


def on_gpus(run: OnlineRun, node_gpus: list[int]) -> tuple[OnlineRun, Layout]:
    """Return the run and its layout on H100s."""
    placed = placed_run(run, node_gpus, h100s(node_gpus))
    return placed, plan_layout(placed.config.layout_settings(run.models.by_role), node_gpus=node_gpus)


def lasts(run: OnlineRun) -> dict[str, Any]:
    return {"total_steps": run.total_steps, "end_ids": run.data.end_ids}


def first_cuda_calls(run: OnlineRun, cluster: Cluster, node_gpus: list[int], folder: Path) -> dict[str, list[Any]]:
    """Start all processes of a command; return the first CUDA call of each, by role."""
    placed, layout = on_gpus(run, node_gpus)
    reservation = Reservation(layout, cluster)
    processes = Processes(cluster, reservation, folder)
    groups = {}
    for name in run.models.by_role:
        plan = start_roles.role_plan(placed.config, run.models, name, **lasts(placed))
        group, factory = processes.ranks(name), plan.role.rank.rpartition(":")[2]
        size = layout.local_size(name)
        groups[name] = group, group.build(f"first_cuda_call:{factory}", plan.settings, local_size=size)
    engines = start_roles._engine_plan(placed.config, run.models.policy, "transformers", processes)
    plans = [engines, start_roles._judge_plan(placed.config, run.models, processes)]
    started = {
        plan.settings.role: [
            processes.engine(number, replace(plan, backend="first_cuda_call:TransformersEngine"), {})
            for number in range(len(layout.of(plan.settings.role)))
        ]
        for plan in plans
        if plan is not None
    }
    found = {}
    for name, (group, building) in groups.items():
        group.wait(building)
        found[name] = [vars(reached) for reached in group.all(lambda reached: reached)]
    for role, several in started.items():
        ray.get([building for _, building in several])
        hosts = [worker.call.remote(host_engine) for worker, _ in several]
        found[role] = [vars(reached) for reached in ray.get(hosts)]
    reservation.release()
    return found


async def host_engine(host: Any) -> Any:
    return host.engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--start", nargs="+", action="append", default=[])
    args = parser.parse_args()
    folder = str(args.folder)
    runs = {
        title: checked(words, args.folder, args.model, args.rows)
        for title, words in (DEFAULTS | readme_commands() | with_judge(args.model)).items()
    }
    nodes = NodesHere(
        initialize_head=True,
        head_node_args={"num_cpus": 16, "num_gpus": 8, "temp_dir": folder, "include_dashboard": False},
    )
    nodes.add_node(num_cpus=16, num_gpus=8)
    os.environ["RAY_ADDRESS"] = nodes.address
    with ray_cluster() as cluster:
        placed = {title: list(placements(run, cluster, args.folder)) for title, run in runs.items()}
        started = {
            f"{title} {gpus}": first_cuda_calls(runs[title], cluster, [*map(int, gpus)], args.folder)
            for title, *gpus in args.start
        }
        print(json.dumps({"nodes": cluster.node_gpus, "placed": placed, "started": started}))
    nodes.shutdown()


if __name__ == "__main__":
    main()
