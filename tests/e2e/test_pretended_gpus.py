"""The default layout of an online run on simulated GPUs, up to the first CUDA call."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "helpers" / "pretended_gpus.py"


def test_ray_gives_every_default_layout_and_each_process_the_gpu_of_its_place(ray_folder):
    (ray_folder / "ray").mkdir()  # Ray writes the cluster address here
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(ray_folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(ray_folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"] == [8, 8]
    assert found["given"] == dict.fromkeys(("[1]", "[2]", "[3]", "[4]", "[8]", "[8, 8]"), True)
    assert len(set(found["actor"])) == 2
    assert sorted(found["engine"]) == sorted(found["actor"])  # each engine shares a GPU with a rank of the actor
