"""Online commands on simulated GPUs: checks, plan, placement and processes, up to the first CUDA call."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "helpers" / "pretended_gpus.py"
SHAPES = [[1], [2], [4], [8], [8, 8]]
COMMANDS = {"ppo", "grpo", "rloo", "remax", "reinforce++", "gkd", "README grpo", "README ppo"}


def on_simulated_gpus(ray_folder: Path, model: str, *started: str) -> dict:
    """Run the program with 128 rows and these commands to start, such as "grpo 8"."""
    folder = ray_folder / str(len(list(ray_folder.iterdir())))  # short: the path of a socket has 107 bytes
    (folder / "ray").mkdir(parents=True)  # Ray writes the cluster address here
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": f"#### {n + 1}"}) + "\n" for n in range(128)))
    starts = [word for line in started for word in ("--start", *line.rsplit(" ", 1))]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(model), str(rows), *starts],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Warnings of Ray may follow.
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def assert_first_cuda_calls(processes: dict[str, list[dict]], num_gpus: int) -> None:
    for role, found in processes.items():
        assert len(found) == num_gpus, role
        assert all("_cuda" in one["error"] or "CUDA" in one["error"] for one in found), found
    assert [one["variables"]["RANK"] for one in processes["actor"]] == [str(rank) for rank in range(num_gpus)]
    gpus = {role: {one["variables"]["CUDA_VISIBLE_DEVICES"] for one in found} for role, found in processes.items()}
    assert len(gpus["actor"]) == num_gpus
    assert gpus["engine"] == gpus["actor"]  # each engine shares a GPU with a rank of the actor
    assert gpus.get("judge", gpus["actor"]) == gpus["actor"]


def test_every_online_command_is_placed_on_simulated_gpus_and_one_starts(ray_folder, model):
    found = on_simulated_gpus(ray_folder, model, "README grpo 2")
    assert found["nodes"] == [8, 8]
    assert found["placed"].keys() >= COMMANDS
    for title, shapes in found["placed"].items():
        assert [one["gpus"] for one in shapes] == SHAPES
        for one in shapes:
            size = sum(one["gpus"])
            assert (one["used"], one["given"], one["as_planned"]) == (size, True, True), (title, one)
            assert one["nodes"] == list(range(len(one["gpus"])))
            # A judge takes turns with all engines, or has a GPU of its own.
            if title == "judge grpo":
                assert one["judges"] == (size if one["sleeps"] else 1), one
                continue
            assert one["engines"] == size, (title, one)
            assert set(one["ranks"].values()) == {size}, (title, one)
            # A model with 0.1M parameters needs no sleep.
            assert (one["sleeps"], one["sync"], one["judges"]) == (False, "ipc", 0), (title, one)
    assert found["placed"]["README ppo"][0]["ranks"].keys() == {"actor", "critic", "ref"}
    assert_first_cuda_calls(found["started"]["README grpo ['2']"], 2)


@pytest.mark.timeout(900)  # eight GPUs are 24 processes
@pytest.mark.parametrize("line", ["README ppo 1", "gkd 2", "judge grpo 2", "rloo 4", "grpo 8"])
def test_other_commands_start_on_simulated_gpus(ray_folder, model, line):
    found = on_simulated_gpus(ray_folder, model, line)
    ((_, processes),) = found["started"].items()
    assert_first_cuda_calls(processes, int(line.rsplit(" ", 1)[1]))
