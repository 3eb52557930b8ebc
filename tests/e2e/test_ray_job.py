"""End-to-end test of `ray job submit -- rlhf ppo ...` on a real cluster whose job server requires a token."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

BIN = Path(sys.executable).parent
NO_AGENT, AGENT_SECONDS = "No available agent to submit job", 180


def free_port() -> int:
    """Return a free port outside the ranges that the kernel and Ray's workers use."""
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
    """Run `ray job submit`, and retry while the head node does not know its agent yet."""
    command = (str(BIN / "ray"), "job", "submit", "--", *words)
    deadline = time.monotonic() + AGENT_SECONDS
    while True:
        done = called(command, environment, 600)
        if NO_AGENT not in done.stderr + done.stdout or time.monotonic() > deadline:
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr
        time.sleep(2)


def end_cluster(folder: Path) -> None:
    """Stop the processes of the cluster in this folder; `ray stop` would stop every Ray on the machine."""
    own = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    for process in own:
        process.kill()  # some Ray processes take 20 s to exit
    psutil.wait_procs(own, timeout=20)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, ray_folder):
    """Start a head node and return the environment of its user."""
    home = tmp_path_factory.mktemp("home")
    port, dashboard, agent = free_port(), free_port(), free_port()  # Ray's default ports may belong to another cluster
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


REWARD = """
import torch


def reward_func(queries, prompts, labels, **kwargs):
    found = [query[len(prompt):].strip() == label for query, prompt, label in zip(queries, prompts, labels)]
    reward = torch.tensor(found, dtype=torch.float32)
    return {"rewards": reward, "scores": reward, "extra_logs": {"answered": torch.ones(len(queries))}}
"""
OPENRLHF_PPO = (
    "--ref_num_nodes 1 --ref_num_gpus_per_node 1 --critic_num_nodes 1 --critic_num_gpus_per_node 1 --actor_num_nodes 1 "
    "--actor_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1 --colocate_all_models "
    "--vllm_gpu_memory_utilization 0.5 --train_batch_size 8 --micro_train_batch_size 8 --micro_rollout_batch_size 16 "
    "--rollout_batch_size 4 --n_samples_per_prompt 2 --max_epochs 1 --prompt_max_len 32 --max_samples 8 "
    "--generate_max_len 6 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 "
    "--init_kl_coef 0.01 --input_key prompt --label_key answer --apply_chat_template "
    "--gradient_checkpointing --packing_samples --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep "
    "--save_hf_ckpt"
)
"""The flags in OpenRLHF's README, with one process per role and the sizes of a tiny model."""


def test_the_words_of_openrlhf_train_as_a_submitted_job(problems, model, cluster, tmp_path):
    saved, run_folder, reward = tmp_path / "policy", tmp_path / "policy_run", tmp_path / "reward_func.py"
    reward.write_text(REWARD)
    paths = f"--pretrain {model} --prompt_data {problems} --remote_rm_url {reward} --save_path {saved}"
    printed = submit(str(BIN / "rlhf"), "ppo", *OPENRLHF_PPO.split(), *paths.split(), environment=cluster)
    assert "succeeded" in printed
    assert "ignored, not needed" in printed
    assert "--packing_samples" in printed.split("ignored, not needed")[1]
    assert (saved / "config.json").exists()
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward_func/answered"] for line in metrics] == [1.0, 1.0]
    assert {path.stem for path in (run_folder / "logs").glob("*-0.log")} == {"actor-0", "critic-0", "ref-0", "engine-0"}
