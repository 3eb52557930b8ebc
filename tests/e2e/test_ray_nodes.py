"""End-to-end test of ppo on several Ray nodes: roles that do not fit on one node are placed on several."""

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

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NODES = Path(__file__).parents[1] / "helpers" / "nodes_of_one_machine.py"


@dataclass
class Nodes:
    """A running cluster."""

    process: subprocess.Popen
    address: str

    def end(self) -> list[list[list[int]]]:
        """Stop the cluster and return the nodes of the placement groups, for each time that they changed."""
        said, _ = self.process.communicate(timeout=120)
        return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def nodes(ray_folder) -> Iterator[Nodes]:
    """Start two nodes with room for two processes each."""
    process = subprocess.Popen(
        [sys.executable, str(NODES), str(ray_folder), "2", "2"],
        # An earlier test may have set the mode to "token" for this process; commands do not inherit it.
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
    # Two actor ranks fill one node; critic and engine fill the other.
    whole = next(groups for groups in seen if len(groups) == 3)
    (first, second), *others = whole
    assert first == second
    assert others == [[1 - first], [1 - first]]
    node_of_actor, *nodes_of_others = found.groups()  # Ray assigns the numbers
    assert nodes_of_others == ["1" if node_of_actor == "0" else "0"] * 2
    assert seen[-1] == [], "the places were given back while the cluster still ran"
