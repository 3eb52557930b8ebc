"""End-to-end test of a run whose reward servers die."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_rewards import KEY, Served, serve
from test_ppo import assert_nothing_left, rlhf

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def servers() -> Iterator[list[Served]]:
    """Start two servers of a verifier."""
    started = [serve("--reward_funcs", "exact") for _ in range(2)]
    yield started
    for server in started:
        server.process.kill()
        server.process.wait()


def reinforce(model: Path, problems: Path, output: Path, servers: list[Served], *, iterations: int) -> subprocess.Popen:
    """Start a minimal run of many short iterations, without critic and reference."""
    words = (
        f"reinforce++ --pretrain {model} --prompt_data {problems} --label_key answer --max_len 64 --init_kl_coef 0 "
        f"--max_new_tokens 4 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 "
        f"--max_iterations {iterations} --num_episodes {iterations} --rollout_backend transformers --output {output} "
        f"--remote_rm_url {','.join(server.url for server in servers)} --remote_rm_timeout 5 --remote_rm_batch_size 2"
    )
    return rlhf(*words.split())


def num_iterations(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for_iterations(output: Path, process: subprocess.Popen, count: int) -> None:
    deadline = time.monotonic() + 300
    while num_iterations(output) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_goes_on_without_a_killed_server_and_ends_by_name_without_any(
    servers, model, problems, tmp_path, monkeypatch
):
    monkeypatch.setenv("RLHF_RM_API_KEY", KEY)
    output = tmp_path / "run"
    process = reinforce(model, problems, output, servers, iterations=100_000)
    wait_for_iterations(output, process, 2)
    servers[0].process.kill()
    servers[0].process.wait()
    wait_for_iterations(output, process, num_iterations(output) + 4)
    servers[1].process.send_signal(signal.SIGSTOP)  # it keeps its connections open but does not answer
    began = time.monotonic()
    said, _ = process.communicate(timeout=120)
    assert time.monotonic() - began < 60
    assert process.returncode == 1
    assert "rewards failed, more than --reward_max_failures 0.1 allows: remote_rm http://127.0.0.1:" in said
    assert_nothing_left(output)
    log = (output / "logs" / "driver.log").read_text()
    assert f"the reward server {servers[0].url} " in log
    assert f"the reward server {servers[1].url} did not answer within 5 s: it is skipped" in log
    rows = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert all(row["reward_failed"] == 0.0 for row in rows)
    assert not any(KEY in file.read_text(errors="ignore") for file in output.rglob("*") if file.is_file())
