"""`ray job submit -- rlhf ppo ...` on a real cluster with its job server, which asks for a token."""

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BIN = Path(sys.executable).parent
NO_AGENT, AGENT_SECONDS = "No available agent to submit job", 180


def free_port() -> int:
    """A port that is free and that neither the kernel nor Ray's workers are handed by chance before it is used."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def called(words: tuple[str, ...], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False
    )


def run(*words: str, environment: dict[str, str], timeout: float = 300) -> str:
    done = called(words, environment, timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def submit(*words: str, environment: dict[str, str]) -> str:
    """`ray job submit`, again while the head node, which is up, has not heard of its own agent yet."""
    command = (str(BIN / "ray"), "job", "submit", "--", *words)
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        done = called(command, environment, 600)
        if NO_AGENT not in done.stderr + done.stdout or time.monotonic() > deadline:
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr
        time.sleep(2)


def end_cluster(folder: Path) -> None:
    """End the processes of the cluster in this folder; `ray stop` would end every Ray of the machine."""
    own = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    for process in own:
        process.terminate()
    _, left = psutil.wait_procs(own, timeout=20)
    for process in left:
        process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, ray_folder):
    """Environment of a user of a running head node."""
    home = tmp_path_factory.mktemp("home")
    port, dashboard, agent = free_port(), free_port(), free_port()  # Ray's defaults may be another cluster's
    environment = os.environ | {
        "HOME": str(home),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    run(str(BIN / "ray"), "get-auth-token", "--generate", environment=environment)
    head = f"start --head --port {port} --dashboard-host 127.0.0.1 --dashboard-port {dashboard} --num-cpus 2"
    head += f" --dashboard-agent-listen-port {agent}"
    run(str(BIN / "ray"), *head.split(), "--temp-dir", str(ray_folder), environment=environment)
    yield environment | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    end_cluster(ray_folder)


def test_a_submitted_job_trains_on_the_cluster(problems, model, cluster, tmp_path):
    output = tmp_path / "run"
    words = (
        f"ppo --pretrain {model} --prompt_data {problems} --label_key answer --reward_funcs exact --max_len 64 "
        f"--max_new_tokens 6 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 --max_iterations 2 "
        f"--rollout_backend transformers --output {output}"
    )
    printed = submit(str(BIN / "rlhf"), *words.split(), environment=cluster)
    assert "succeeded" in printed
    assert (output / "model" / "config.json").exists()
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 2
