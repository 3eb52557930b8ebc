"""End-to-end test of a run whose reward servers die."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Command, started_rlhf
from served_rewards import KEY, Served, serve
from test_ppo import assert_nothing_left

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def servers() -> Iterator[list[Served]]:
    """Start two servers of a verifier."""
    started = [serve("--reward_funcs", "exact") for _ in range(2)]
    yield started
    for server in started:
        server.process.kill()
        server.process.wait()


def reinforce_words(model: Path, problems: Path, output: Path, servers: list[Served]) -> list[str]:
    """Return the arguments of a minimal run of many short iterations, without critic and reference."""
    words = (
        f"reinforce++ --pretrain {model} --prompt_data {problems} --label_key answer --max_len 64 --init_kl_coef 0 "
        f"--max_new_tokens 4 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 "
        f"--max_iterations 100000 --num_episodes 100000 --rollout_backend transformers --output {output} "
        f"--remote_rm_url {','.join(server.url for server in servers)} --remote_rm_timeout 5 --remote_rm_batch_size 2"
    )
    return words.split()


def num_iterations(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for_iterations(output: Path, command: Command, count: int) -> None:
    deadline = time.monotonic() + 300
    while num_iterations(output) < count:
        assert command.is_running(), command.printed()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_goes_on_without_a_killed_server_and_ends_by_name_without_any(
    servers, model, problems, tmp_path, monkeypatch
):
    monkeypatch.setenv("RLHF_RM_API_KEY", KEY)
    output = tmp_path / "run"
    with started_rlhf(*reinforce_words(model, problems, output, servers)) as command:
        wait_for_iterations(output, command, 2)
        servers[0].process.kill()
        servers[0].process.wait()
        wait_for_iterations(output, command, num_iterations(output) + 4)
        servers[1].process.send_signal(signal.SIGSTOP)  # it keeps its connections open but does not answer
        began = time.monotonic()
        said = command.finish(status=1, seconds=120)
    assert time.monotonic() - began < 60
    assert "rewards failed, more than --reward_max_failures 0.1 allows: remote_rm http://127.0.0.1:" in said
    assert_nothing_left(output)
    log = (output / "logs" / "driver.log").read_text()
    assert f"the reward server {servers[0].url} " in log
    assert f"the reward server {servers[1].url} did not answer within 5 s: it is skipped" in log
    rows = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert all(row["reward_failed"] == 0.0 for row in rows)
    assert not any(KEY in file.read_text(errors="ignore") for file in output.rglob("*") if file.is_file())
