"""End-to-end tests of `rlhf ppo`: real Ray actors, DeepSpeed engines and rollout engines on a tiny model."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from forked import Command, run_rlhf, started_rlhf
from killed_runs import (
    assert_same_run,
    engine_process,
    halted,
    plain_metrics,
    processes_of,
    rlhf,
    wait_for,
    writer_of,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from two_turns import game_file, with_many_ends

from rlhf_cli.backends.process.signals import INTERRUPTED
from rlhf_cli.tracking.figures import number
from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RAYS_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Ray processes that try for a minute after the driver was killed to report to a server that is gone."""
ITERATIONS = 4
NOTICED_SECONDS = 30.0
"""Time limit for noticing and naming a dead process of the run."""


def line_with(text: str, process: subprocess.Popen, *, seconds: float) -> str:
    """Return the next line that contains the text, which must be printed within `seconds`."""
    assert process.stdout is not None
    begin = time.monotonic()
    line = next(line for line in process.stdout if text in line)
    assert time.monotonic() - begin < seconds
    return line


def ppo_words(
    model: Path, problems: Path, output: Path, *, backend: str, iterations: int = ITERATIONS, save_steps: int = 1
) -> list[str]:
    words = (
        f"ppo --pretrain {model} --prompt_data {problems} --label_key answer --reward_funcs exact --max_len 64 "
        f"--max_new_tokens 6 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 4 "
        f"--max_iterations {iterations} --num_episodes {iterations} --actor_learning_rate 1e-3 "
        f"--critic_learning_rate 1e-3 --init_kl_coef 0.01 "
        f"--kl_target 1 --save_steps {save_steps} --output {output} --enforce_eager --rollout_backend {backend}"
    )
    return words.split()


def assert_nothing_left(output: Path, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while left := processes_of(output):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def wait_for_an_iteration(output: Path, process: subprocess.Popen) -> None:
    wait_for(output / "metrics.jsonl", process)
    while not read_metrics(output):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def kill_driver(process: subprocess.Popen, *, seconds: float = 30) -> None:
    """Kill only the command with SIGKILL; its other processes, including Ray's, must notice and exit."""
    started = psutil.Process(process.pid).children(recursive=True)
    assert {"raylet", "gcs_server"} <= {child.name() for child in started}
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + seconds
    while left := [child for child in started if goes_on(child)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def goes_on(process: psutil.Process) -> bool:
    """Check whether a process still runs that should have ended with its driver."""
    try:
        is_there = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return is_there and process.name() not in RAYS_AGENTS
    except psutil.NoSuchProcess:
        return False


ENGINE_ARGUMENTS = '{"max_num_seqs": 200}'
"""An engine argument without effect on the schedule: at most 8 responses are in an engine at a time."""


def run_words(model: Path, problems: Path, output: Path, *, backend: str) -> list[str]:
    """Return the arguments of a run: one engine has single turns in float32, the other episodes in bfloat16."""
    if backend == "transformers":
        return [*ppo_words(model, problems, output, backend=backend), "--param_dtype", "fp32"]
    words = ppo_words(with_many_ends(model), problems, output, backend=backend)
    words[words.index("exact")] = "exact,environment"
    played = f"--environment {game_file(problems.parent)} --max_turns 2"
    return [*words, *played.split(), "--vllm_args", ENGINE_ARGUMENTS]


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def finished_run(request, tmp_path_factory, model, problems) -> tuple[str, Path]:
    """Return (backend, run directory) of an uninterrupted run."""
    backend, output = request.param, tmp_path_factory.mktemp("ppo") / "whole"
    events = f"(cat; echo) >> {output.parent}/events.jsonl"
    shown = ["--print_samples", "1", "--on_event", events]
    (output.parent / "printed.txt").write_text(run_rlhf(*run_words(model, problems, output, backend=backend), *shown))
    assert_nothing_left(output)
    return backend, output


def test_a_run_leaves_a_model_metrics_samples_and_a_report(finished_run):
    _, output = finished_run
    metrics = plain_metrics(output)
    assert sorted(metrics) == list(range(1, ITERATIONS + 1))
    assert {"reward", "policy_loss", "critic/value_loss", "kl", "entropy", "rollout_k3"} <= metrics[1].keys()
    assert len((output / "samples.jsonl").read_text().splitlines()) == ITERATIONS * 8
    assert (output / "report.html").stat().st_size > 10_000
    AutoModelForCausalLM.from_pretrained(output / "model")
    assert AutoTokenizer.from_pretrained(output / "model").chat_template


def test_events_and_responses_are_those_of_the_run(finished_run):
    backend, output = finished_run
    start, *alarms, end = map(json.loads, (output.parent / "events.jsonl").read_text().splitlines())
    assert (start["event"], end["event"], end["message"]) == ("start", "end", "finished")
    assert (end["run"]["state"], end["run"]["step"], end["run"]["checkpoint"]) == ("finished", ITERATIONS, ITERATIONS)
    printed = (output.parent / "printed.txt").read_text()
    assert all(alarm["event"] == "alarm" and f"Alarm: {alarm['message']}\n" in printed for alarm in alarms)
    assert [alarm["message"] for alarm in alarms] == end["run"]["alarms"]
    # The untrained model is never right. The second engine's episodes also have the environment's reward.
    assert [alarm["message"].split()[0] for alarm in alarms] == ["dead-reward"] * (backend == "transformers")
    rows = list(map(json.loads, (output / "samples.jsonl").read_text().splitlines()))
    for row in rows[::8]:
        head = next(line for line in printed.splitlines() if line.startswith(row["id"]))
        assert f"reward {number(row['reward'])}  advantage {number(row['advantage'])}" in head


def last_response(output: Path) -> str:
    """Return the id of the last response, whose iteration has a checkpoint directly before it."""
    return json.loads((output / "samples.jsonl").read_text().splitlines()[-1])["id"]


@pytest.mark.parametrize("finished_run", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)], indirect=True)
def test_a_response_is_explained_with_the_numbers_of_the_run(finished_run, tmp_path):
    _, output = finished_run
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != ".lock"}
    file = tmp_path / "explanation.json"
    printed = run_rlhf("why", output, "--sample", last_response(output), "--token", "1", "--json_file", file)
    explained = json.loads(file.read_text())
    row = json.loads((output / "samples.jsonl").read_text().splitlines()[-1])
    assert len(explained["tokens"]) == row["length"]
    assert "\n".join(explained["tokens"][1]["lines"]) in printed
    rollout = sum(token["values"]["rollout"] for token in explained["tokens"])
    assert rollout == pytest.approx(row["rollout_logprob"], abs=1e-4)
    assert "Equal to the run: all " in printed
    assert "GAE, arXiv 1506.02438, eq. 16" in printed
    assert "Token 1, " in printed
    shares = [
        line for token in explained["tokens"] for line in token["lines"] if "share of the gradient norm: " in line
    ]
    assert len(shares) >= row["length"]
    assert all("g_t . g / |g|^2 = " in line for line in shares)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != ".lock"} == before


@pytest.mark.parametrize("finished_run", ["transformers"], indirect=True)
def test_an_iteration_is_replayed_with_other_settings(finished_run):
    _, output = finished_run
    printed = run_rlhf("replay", output, "--iteration", "4", "--set", "eps_clip=0.001,actor_learning_rate=1e-4")
    assert "Equal to the run: all metrics of the iteration" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("  ")}
    assert float(rows["clip_high"][1]) > float(rows["clip_high"][0])
    assert "reward" not in rows  # the samples are the same


@pytest.mark.slow
@pytest.mark.parametrize("finished_run", ["transformers"], indirect=True)
def test_an_iteration_samples_again_at_another_temperature(finished_run):
    _, output = finished_run
    printed = run_rlhf("replay", output, "--iteration", "4", "--sample_again", "--set", "temperature=0.5")
    assert "Equal to the run: all metrics of the iteration" in printed
    assert "new samples temperature=0.5" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("  ")}
    assert float(rows["entropy"][1]) < float(rows["entropy"][0])


@pytest.mark.slow  # another run of the same length
@pytest.mark.parametrize("finished_run", ["transformers"], indirect=True)
def test_a_run_repeats_bit_for_bit_with_its_samples(finished_run, tmp_path):
    _, output = finished_run
    printed = run_rlhf("rerun", output, "--output", tmp_path / "again")
    assert f"Equal, bit for bit: all metrics up to iteration {ITERATIONS}" in printed
    assert f"{ITERATIONS * 8} samples and the model" in printed


@pytest.mark.slow
@pytest.mark.parametrize("finished_run", ["transformers"], indirect=True)
def test_a_run_is_bisected_with_its_own_rewards(finished_run, problems, tmp_path):
    _, output = finished_run
    printed = run_rlhf(
        *("compare", output, "--bisect", "--prompt_data", problems, "--max_samples", 8, "--output", tmp_path / "kept")
    )
    # Checkpoints of ppo hold a critic, too.
    assert any("actor" in folder.name for folder in (tmp_path / "kept").iterdir())
    assert "the reference (first checkpoint of " in printed
    assert "broke" in printed
    for folder in (tmp_path / "kept").iterdir():
        assert len((folder / "samples.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize("finished_run", ["vllm"], indirect=True)
def test_responses_are_episodes_with_an_environment_in_its_processes(finished_run):
    _, output = finished_run
    for metrics in plain_metrics(output).values():
        assert 1.8 < metrics["episode/turns"] <= 2
        assert metrics["episode/failed"] == 0
        assert metrics["reward/environment"] > 0
    for line in (output / "samples.jsonl").open():
        roles = [message["role"] for message in json.loads(line)["messages"]]
        assert roles in (["assistant"], ["assistant", "user", "assistant"])


@pytest.mark.parametrize("finished_run", ["vllm"], indirect=True)
def test_an_engine_argument_of_the_command_line_reaches_the_engine(finished_run):
    _, output = finished_run
    (line,) = [
        line for line in (output / "logs" / "engine-0.log").read_text().splitlines() if "vLLM starts with" in line
    ]
    arguments = json.loads(line.partition("vLLM starts with")[2])
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (200, 64)
    assert yaml.safe_load((output / "config.yaml").read_text())["vllm_args"] == ENGINE_ARGUMENTS


def test_engine_and_trainer_agree_on_probabilities(finished_run):
    _, output = finished_run
    for metrics in plain_metrics(output).values():
        assert metrics["rollout_diff_max"] < 0.2
        assert metrics["rollout_prob_correlation"] > 0.99


def test_the_actor_moves(finished_run, model):
    _, output = finished_run
    before, after = load_file(model / "model.safetensors"), load_file(output / "model" / "model.safetensors")
    moved = {name for name, weight in after.items() if not weight.equal(before[name])}
    assert {name for name in after if name.endswith("proj.weight")} <= moved


@pytest.mark.slow  # with transformers, the next test covers the same in CI
@pytest.mark.parametrize("finished_run", ["vllm"], indirect=True)
def test_a_run_whose_engine_and_then_whose_driver_is_killed_goes_on_as_if_unharmed(
    finished_run, tmp_path, model, problems
):
    """A killed vLLM process is restarted with the current weights; a killed run is resumed."""
    backend, whole = finished_run
    output = tmp_path / "killed"
    words = run_words(model, problems, output, backend=backend)
    process = rlhf(*words)
    try:
        wait_for(output / "checkpoints" / "step_000001" / "manifest.json", process)
        with halted(process):
            engine_process(output, backend).kill()
        wait_for(output / "checkpoints" / "step_000002" / "manifest.json", process)
        kill_driver(process)
    finally:
        process.kill()
    assert_nothing_left(output)
    run_rlhf(*words, "--load_checkpoint")
    assert_same_run(whole, output)


@pytest.mark.parametrize("finished_run", ["transformers"], indirect=True)
def test_a_run_whose_engine_actor_and_driver_are_killed_ends_like_an_uninterrupted_run(
    finished_run, tmp_path, model, problems
):
    """An engine is restarted within the run, an actor with the one allowed restart; a killed driver is resumed."""
    backend, whole = finished_run
    output = tmp_path / "restarted"
    words = run_words(model, problems, output, backend=backend)
    process = rlhf(*words, "--max_restarts", "1")
    try:
        wait_for(output / "checkpoints" / "step_000001" / "manifest.json", process)
        with halted(process):
            engine_process(output, backend).kill()
        wait_for(output / "checkpoints" / "step_000002" / "manifest.json", process)
        with halted(process):
            writer_of(output / "logs" / "actor-0.log", "Worker").kill()
        noticed = line_with("rlhf ppo: actor rank 0 died", process, seconds=NOTICED_SECONDS)
        wait_for(output / "checkpoints" / "step_000003" / "manifest.json", process)
        kill_driver(process)
    finally:
        process.kill()
    assert "going on from the last checkpoint (restart 1 of 1)" in noticed
    assert_nothing_left(output)
    run_rlhf(*words, "--load_checkpoint")
    assert_same_run(whole, output)


SHARED = "--sequence_parallel_size 2 --critic_sequence_parallel_size 1 --ref_sequence_parallel_size 1"
"""The actor's two ranks share each sequence, the critic's two do not; the reference has one rank."""


@pytest.mark.parametrize("finished_run", ["transformers"], indirect=True)
@pytest.mark.parametrize("shared", [pytest.param("", marks=pytest.mark.slow), SHARED], ids=["apart", "shared"])
def test_two_ranks_and_two_engines_do_what_one_of_each_does(finished_run, shared, tmp_path, model, problems):
    backend, alone = finished_run
    output = tmp_path / "two"
    many = "--actor_num_gpus_per_node 2 --critic_num_gpus_per_node 2 --vllm_num_engines 2"
    said = run_rlhf(*run_words(model, problems, output, backend=backend), *many.split(), *shared.split())
    assert ("2 ranks share each sequence of actor, up to 32,384 tokens" in said) == bool(shared)
    assert_nothing_left(output)
    one, two = plain_metrics(alone), plain_metrics(output)
    assert one.keys() == two.keys()
    responses = [[json.loads(line)["response"] for line in (run / "samples.jsonl").open()] for run in (alone, output)]
    for step in (1, 2):  # the sums of the ranks are rounded differently, which grows with each update
        assert one[step] == pytest.approx(two[step], rel=1e-3, abs=1e-5), step
        assert responses[0][8 * (step - 1) : 8 * step] == responses[1][8 * (step - 1) : 8 * step]


def endless_words(
    command: str, model: Path, problems: Path, output: Path, *, backend: str = "transformers"
) -> list[str]:
    """Return the arguments of a run that only ends when interrupted, and saves only then."""
    words = ppo_words(model, problems, output, backend=backend, iterations=500, save_steps=-1)
    if command != "ppo":  # without critic and reference: two processes fewer
        for name in ("--critic_learning_rate", "--kl_target"):
            place = words.index(name)
            del words[place : place + 2]
        words[words.index("--init_kl_coef") + 1] = "0"
    return [command, *words[1:]]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, model, problems):
    output = tmp_path / "impatient"
    process = rlhf(*endless_words("rloo", model, problems, output), start_new_session=True)
    try:
        wait_for_an_iteration(output, process)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.2)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, printed
    assert "The run ends as soon as an iteration is done and saved; a second Ctrl-C ends it at once" in printed
    assert_nothing_left(output)


BACKENDS = {"ppo": "transformers", "grpo": "vllm"}
"""The engine of the interrupted run of each command."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a run interrupted by each signal in turn and resumed after each."""
    root = tmp_path_factory.mktemp("interrupted")
    return lambda command: root / command


# Each engine is tested with both ways of delivery: a terminal signals the process group, `kill` one process.
@pytest.mark.parametrize(
    ("command", "signum"),
    [
        ("ppo", signal.SIGTERM),
        pytest.param("grpo", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("grpo", signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_finishes_its_iteration_saves_and_leaves_no_process(
    interrupted, model, problems, command, signum
):
    output = interrupted(command)
    words = endless_words(command, model, problems, output, backend=BACKENDS[command])
    before = max(read_metrics(output), default=0)
    with started_rlhf(*words, "--load_checkpoint") as running:
        wait_until_step(before + 1, output, running)
        engine = engine_process(output, BACKENDS[command])
        running.stop(signum)
        printed = running.finish(status=INTERRUPTED, seconds=240)
    assert_stopped_after_a_step(output, printed)
    assert not goes_on(engine)


def wait_until_step(step: int, output: Path, running: Command, *, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while max(read_metrics(output), default=0) < step:
        assert running.is_running(), running.printed()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_stopped_after_a_step(output: Path, printed: str) -> None:
    last = max(read_metrics(output))
    assert (output / "checkpoints" / f"step_{last:06d}" / "manifest.json").exists(), printed
    assert "--load_checkpoint" in printed
    assert_nothing_left(output)


@pytest.mark.slow
def test_a_run_that_timeout_ends_with_its_whole_group_saves(tmp_path, model, problems):
    output = tmp_path / "timeout"
    words = endless_words("reinforce++", model, problems, output)
    process = rlhf(*words, under=["timeout", "3600"], start_new_session=True)
    try:
        wait_for_an_iteration(output, process)
        process.terminate()
        printed, _ = process.communicate(timeout=240)
    finally:
        process.kill()  # otherwise a failure of this test leaves 500 iterations running
    assert process.returncode == INTERRUPTED, printed
    assert_stopped_after_a_step(output, printed)
