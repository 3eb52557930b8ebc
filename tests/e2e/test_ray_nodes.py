"""ppo on a Ray cluster of several nodes: roles that do not fit on one node sit on different ones, and train."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from forked import run_rlhf
from test_ppo import assert_nothing_left, plain_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NODES = Path(__file__).parents[1] / "helpers" / "nodes_of_one_machine.py"


@dataclass
class Nodes:
    """A running cluster."""

    process: subprocess.Popen
    address: str

    def end(self) -> list[list[list[int]]]:
        """End the cluster; which nodes the groups of places were on, each time that changed."""
        said, _ = self.process.communicate(timeout=120)
        return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def nodes(ray_folder) -> Iterator[Nodes]:
    """Two nodes that each have room for two processes."""
    process = subprocess.Popen(
        [sys.executable, str(NODES), str(ray_folder), "2", "2"],
        # An earlier test of this process that started Ray has set the mode to "token", which commands do not inherit.
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield Nodes(process, process.stdout.readline().strip())
    if process.poll() is None:
        process.communicate(timeout=120)
    own = [p for p in psutil.process_iter(["cmdline"]) if str(ray_folder) in " ".join(p.info["cmdline"] or [])]
    for left in own:
        left.kill()
    assert not own


def test_ranks_and_engine_sit_on_different_nodes_and_train_together(problems, model, nodes, tmp_path, monkeypatch):
    output = tmp_path / "run"
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    words = (
        f"ppo --pretrain {model} --prompt_data {problems} --label_key answer --reward_funcs exact --max_len 64 "
        f"--max_new_tokens 6 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 --max_iterations 2 "
        f"--rollout_backend transformers --output {output} --init_kl_coef 0 --actor_num_gpus_per_node 2"
    )
    said = run_rlhf(*words.split())
    shown = r"node (\d): 2 processes for actor; node (\d): 1 process for critic; node (\d): 1 process for engine"
    found = re.search(shown, said)
    assert found, said
    seen = nodes.end()
    assert sorted(plain_metrics(output)) == [1, 2]
    assert (output / "model" / "config.json").exists()
    assert_nothing_left(output)
    # Two ranks of the actor fill a node; critic and engine fill the other one.
    whole = next(groups for groups in seen if len(groups) == 3)
    (first, second), *others = whole
    assert first == second
    assert others == [[1 - first], [1 - first]]
    node_of_actor, *nodes_of_others = found.groups()  # the numbers are Ray's
    assert nodes_of_others == ["1" if node_of_actor == "0" else "0"] * 2
    assert seen[-1] == [], "the places were given back while the cluster still ran"
