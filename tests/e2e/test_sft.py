"""End-to-end tests of `rlhf sft`: each launcher, and each way to stop a run.

A run that is killed or interrupted and then restarted ends with the weights and metrics of an uninterrupted run, bit
for bit. No process remains after any kind of exit.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest
import torch
from extending_page import page_file
from forked import run_rlhf

from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.runs.recorded_runs import read_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PATIENCE = 600
"""Time limit in seconds for any wait. The first run with two ranks compiles DeepSpeed's operators, which took 5 minutes
on a busy machine.
"""
STEPS, SAVE_STEPS = 24, 3
MARK = "RLHF_TEST_RUN"
UNEQUAL = ("time/", "perf/", "memory/")  # metrics of speed and memory
RLHF, DEEPSPEED, TORCHRUN = (str(Path(sys.executable).parent / name) for name in ("rlhf", "deepspeed", "torchrun"))
LAUNCHERS = {
    "one process": [RLHF, "sft"],
    "num_processes": [RLHF, "sft", "--num_processes", "2"],
    "deepspeed": [DEEPSPEED, "--num_accelerators", "2", "--master_port", "29617", "--module", "rlhf_cli", "sft"],
    "torchrun": [TORCHRUN, "--nproc_per_node", "2", "--master_port", "29618", "-m", "rlhf_cli", "sft"],
}


class Running:
    """A command and all processes that it started, found by an environment variable."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.log = log
        self._found: set[psutil.Process] = set()
        environment = os.environ | {MARK: self._mark, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("w") as output:
            self.main = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def processes(self) -> list[psutil.Process]:
        # An exiting process loses its environment before it releases its locks, so those found before stay in the list.
        self._found |= {process for process in psutil.process_iter() if environment_of(process).get(MARK) == self._mark}
        return [process for process in self._found if is_alive(process)]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in rank order."""
        found = {environment_of(process).get("RANK"): process for process in self.processes()}
        return [found[rank] for rank in sorted(name for name in found if name is not None)]

    def wait_for_a_step(self) -> None:
        wait_until(lambda: "\nstep " in self.log.read_text(), what="a step is done", running=self)

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the foreground process group, as a terminal does."""
        os.killpg(self.main.pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait until no process remains and return the exit status."""
        try:
            status = self.main.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run does not end:\n{self.log.read_text()[-3000:]}")
        wait_until(lambda: not self.processes(), within=120, what="no process is left")
        return status

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()
        self.main.wait()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if is_alive(process) else {}
    except (psutil.Error, OSError):
        return {}


def wait_until(
    true: Callable[[], bool],
    *,
    what: str,
    within: float = PATIENCE,
    every: float = 0.02,
    running: Running | None = None,
) -> None:
    end = time.monotonic() + within
    while not true():
        if time.monotonic() > end:
            pytest.fail(f"waited {within} s in vain until {what}")
        if running is not None and running.main.poll() is not None:
            pytest.fail(f"the run ended before {what}:\n{running.log.read_text()[-3000:]}")
        time.sleep(every)


class Place:
    """A folder of runs with data and a model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = random.Random(0)
        sums = [(rng.randrange(100), rng.randrange(100)) for _ in range(64)]
        rows = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a, b in sums]
        (folder / "sums.jsonl").write_text("\n".join(rows))
        (folder / "many.jsonl").write_text("\n".join(rows * 16))
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"vocab_size": 300}
        flags = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
        run_rlhf("scratch", "--dataset", folder / "sums.jsonl", *flags, "--output", folder / "tiny")
        self._name_another_end(folder / "tiny")
        self._started: list[Running] = []

    def _name_another_end(self, model: Path) -> None:
        """Change the model's files to a base model's: the end token is the end of text instead of the end of turn."""
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            found = json.loads((model / name).read_text())
            end = {"eos_token": "<|endoftext|>"} if "tokenizer" in name else {"eos_token_id": 0}
            (model / name).write_text(json.dumps(found | end))

    def new_name(self, kind: str) -> str:
        """Return an unused run name, so that a test can be repeated."""
        return f"{kind}_{len(self._started)}"

    def start(self, name: str, launcher: str | list[str], *flags: str, **settings: str) -> Running:
        """Start `rlhf sft` or a similar command with the output folder of that name."""
        data = str(self.folder / "sums.jsonl")
        usual = {"pretrain": str(self.folder / "tiny"), "dataset": data, "output": str(self.folder / name)}
        usual |= {"train_batch_size": "8", "max_epochs": "3", "learning_rate": "1e-2", "param_dtype": "fp32"}
        usual |= {"save_steps": str(SAVE_STEPS), "eval_dataset": data, "eval_steps": "10"}
        words = [word for key, value in (usual | settings).items() for word in (f"--{key}", value)]
        log = self.folder / f"{name}-{len(self._started)}.log"
        command = LAUNCHERS[launcher] if isinstance(launcher, str) else launcher
        running = Running([*command, *words, "--no_use_tensorboard", *flags], log)
        self._started.append(running)
        return running

    def close(self) -> None:
        for running in self._started:
            running.kill_all()

    def metrics(self, name: str) -> list[dict[str, float]]:
        """Return the lines of metrics.jsonl without timing metrics."""
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(UNEQUAL)} for line in lines]

    def last_step(self, name: str) -> int:
        return max((int(line["step"]) for line in self.metrics(name)), default=0)

    def last_checkpoint(self, name: str) -> int:
        return max(CheckpointStore(self.folder / name / "checkpoints", max_num=1).steps(), default=0)

    def weights(self, name: str) -> bytes:
        return (self.folder / name / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("sft"))
    yield place
    place.close()


@pytest.fixture(scope="module")
def finished(place: Place) -> Callable[[str], str]:
    """Return the name of an uninterrupted run, by launcher; each runs once."""
    done: dict[str, str] = {}

    def run(launcher: str) -> str:
        if launcher not in done:
            # A new name, because a failed run may have left its folder.
            name = place.new_name(launcher.replace(" ", "_"))
            running = place.start(name, launcher)
            assert running.wait() == 0, running.log.read_text()[-3000:]
            done[launcher] = name
        return done[launcher]

    return run


@pytest.mark.parametrize(
    "launcher",
    ["one process", "num_processes", *(pytest.param(one, marks=pytest.mark.slow) for one in ("deepspeed", "torchrun"))],
)
def test_every_launcher_trains_the_same_model(place, finished, launcher):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    alone, name = finished("one process"), finished(launcher)
    assert place.last_step(name) == STEPS
    for one, other in zip(place.metrics(alone), place.metrics(name), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    losses = [line["loss"] for line in place.metrics(name) if "loss" in line]
    assert losses[-1] < 0.6 * losses[0]
    models = [AutoModelForCausalLM.from_pretrained(place.folder / run / "model") for run in (alone, name)]
    tokenizer = AutoTokenizer.from_pretrained(place.folder / name / "model")
    prompt = tokenizer("1+1=", return_tensors="pt").input_ids
    logits = [model(prompt).logits for model in models]
    assert torch.allclose(*logits, atol=0.05)
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert models[1].generation_config.eos_token_id == ends  # the base model's end of text, and the trained end of turn
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], add_generation_prompt=True)
    response = models[1].generate(torch.tensor([chat["input_ids"]]), max_new_tokens=64, do_sample=False)[
        0, len(chat["input_ids"]) :
    ]
    assert response[-1] == ends[1]
    assert len(response) < 64
    assert tokenizer.chat_template
    said = (place.folder / name / "config.yaml").read_text()
    assert "train_batch_size: 8" in said
    assert (place.folder / name / "report.html").stat().st_size > 1000


def test_a_command_outside_the_program_trains_as_its_parts_do(place, finished):
    """The focal loss of docs/extending.md with exponent 0 equals the loss of `rlhf sft`."""
    command = [RLHF, f"{page_file(place.folder, 'focal_sft.py')}:focal_sft", "--focus", "0"]
    name = place.new_name("focal")
    running = place.start(name, command)
    assert running.wait() == 0, running.log.read_text()[-3000:]
    expected = place.metrics(finished("one process"))
    found = place.metrics(name)
    assert {line.pop(name) for line in found for name in [*line] if name.endswith("focal_weight")} == {1.0}
    assert found == expected
    assert place.weights(name) == place.weights(finished("one process"))


def test_several_ranks_show_their_progress_once(place, finished):
    name = finished("num_processes")
    (log,) = [running.log for running in place._started if running.log.name.startswith(f"{name}-")]
    shown = log.read_text()
    assert shown.count("step 24/24") == 1
    assert "Finished: 24/24 steps" in shown
    assert "WARNING" not in shown
    assert {path.name for path in (place.folder / name / "logs").iterdir()} == {"rank0.log", "rank1.log"}


def start_reported(place: Place, name: str, launcher: str, *flags: str) -> Running:
    """Start a run that appends its events to a file."""
    return place.start(name, launcher, *flags, on_event=f"(cat; echo) >> {place.folder}/{name}-events.jsonl")


def events(place: Place, name: str) -> list[tuple[str, str]]:
    """Return kind and message of each event of the runs with this name."""
    lines = (place.folder / f"{name}-events.jsonl").read_text().splitlines()
    return [(event["event"], event["message"]) for event in map(json.loads, lines)]


def kill_in_a_step(place: Place, name: str, running: Running) -> None:
    """Kill one rank with SIGKILL at a random moment after the first checkpoint."""
    wait_until(lambda: place.last_checkpoint(name) >= SAVE_STEPS, what="there is a checkpoint", running=running)
    victims = running.ranks() or [psutil.Process(running.main.pid)]
    time.sleep(random.uniform(0, 0.15))
    victims[-1].kill()
    assert running.wait() not in (0, 2, 130)
    assert place.last_step(name) < STEPS, "the kill came too late"


def kill_while_writing(place: Place, name: str, *, launcher: str) -> None:
    """Kill all processes with SIGKILL, as in a power failure, while a checkpoint is written.

    The ranks are suspended first; if the checkpoint is complete by then, they continue to the next one.
    """
    checkpoints = place.folder / name / "checkpoints"

    def is_writing() -> bool:
        return any(checkpoints.glob(".writing-*"))

    running = start_reported(place, name, launcher, "--load_checkpoint")
    running.wait_for_a_step()
    processes = running.processes()
    ranks = running.ranks() or processes
    while True:
        before = place.last_checkpoint(name)
        wait_until(is_writing, what="a checkpoint is written", every=0.001, running=running)
        for rank in ranks:
            rank.suspend()
        if is_writing() and place.last_checkpoint(name) == before:
            break
        for rank in ranks:
            rank.resume()
    for process in processes:
        process.kill()
    running.wait()


def stop(place: Place, name: str, *, launcher: str, press: Callable[[Running], None]) -> None:
    """Request a stop after a step and check that the run ends, saves and reports it."""
    running = start_reported(place, name, launcher, "--load_checkpoint")
    running.wait_for_a_step()
    press(running)
    assert running.wait() == 130, running.log.read_text()[-3000:]
    assert place.last_checkpoint(name) == place.last_step(name) < STEPS
    assert running.log.read_text().count("The run ends as soon as a step is done and saved") == 1
    assert "Interrupted" in running.log.read_text()
    assert not (place.folder / name / "model").exists()


def finish(place: Place, name: str, *, launcher: str) -> None:
    running = start_reported(place, name, launcher, "--load_checkpoint")
    assert running.wait() == 0, running.log.read_text()[-3000:]


@pytest.mark.parametrize(
    ("launcher", "press"),
    [
        ("one process", lambda running: running.main.terminate()),
        pytest.param("num_processes", Running.press_ctrl_c, marks=pytest.mark.slow),
    ],
    ids=["one process SIGTERM", "num_processes SIGINT"],
)
def test_a_run_stopped_in_every_way_ends_as_one_never_stopped(place, finished, launcher, press):
    reference, name = finished(launcher), place.new_name("stopped")
    kill_in_a_step(place, name, start_reported(place, name, launcher))
    # A command that is killed itself reports nothing, but `rlhf` survives the ranks that it has started.
    killed = [("start", "")] if launcher == "one process" else [("start", ""), ("failure", ANY)]
    assert events(place, name) == killed
    kill_while_writing(place, name, launcher=launcher)
    assert read_run(place.folder / name).state == "killed"
    stop(place, name, launcher=launcher, press=press)
    assert read_run(place.folder / name).state == "stopped"
    finish(place, name, launcher=launcher)
    assert read_run(place.folder / name).state == "finished"
    later = [("start", ""), ("start", ""), ("end", "interrupted"), ("start", ""), ("end", "finished")]
    assert events(place, name) == [*killed, *later]
    assert place.metrics(name) == place.metrics(reference)
    assert place.weights(name) == place.weights(reference)
    assert not list((place.folder / name / "checkpoints").glob(".writing*"))


def test_a_run_repeats_bit_for_bit_and_changed_data_are_named(place, finished, tmp_path):
    run, data = place.folder / finished("one process"), place.folder / "sums.jsonl"
    printed = run_rlhf("rerun", run, "--output", tmp_path / "same")
    assert re.search(rf"Equal, bit for bit: all metrics up to step {STEPS} \(\d+ values\) and the model", printed)
    rows = data.read_text()
    try:
        # The last row has other text, but the same number of tokens to train on.
        data.write_text(rows[: rows.rindex('"') - 1] + ("1" if rows[rows.rindex('"') - 1] != "1" else "2") + '"}')
        printed = run_rlhf("rerun", run, "--output", tmp_path / "changed", status=1)
    finally:
        data.write_text(rows)
    assert "likely cause: the data have changed; data: " in printed
    assert "contents of the training rows" in printed


def test_the_rows_of_a_step_are_listed_by_their_loss(place, finished):
    run = place.folder / finished("one process")
    printed = run_rlhf("why", run, "--step", "2")
    assert re.search(r"^Optimizer step 2 of rlhf sft: loss [\d.]+$", printed, re.MULTILINE)
    rows = re.findall(r"^ +([\d.]+)  (\S+:\d+) ", printed, re.MULTILINE)
    losses = [float(loss) for loss, _ in rows]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == len(dict.fromkeys(place for _, place in rows)) == 8
    worst = run_rlhf("why", run, "--step", "2", "--sample", rows[0][1])
    assert f"  loss                    {losses[0]:g}\n" in worst


# Enough steps that the run must be interrupted; checkpoints are written only then.
ENDLESS = {"max_epochs": "100000", "save_steps": "-1", "eval_steps": "-1"}
LONG_STEP_ROWS = 256
"""Rows of a step that takes seconds, so that the test's second signal arrives before the step ends."""
LONG_STEPS = ENDLESS | {"train_batch_size": str(LONG_STEP_ROWS), "micro_train_batch_size": "1", "zero_stage": "3"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["one process", "num_processes"])
def test_a_second_ctrl_c_ends_at_once(place, launcher):
    name = place.new_name("twice")
    running = place.start(name, launcher, dataset=str(place.folder / "many.jsonl"), **LONG_STEPS)
    running.wait_for_a_step()
    running.press_ctrl_c()
    time.sleep(0.05)
    running.press_ctrl_c()
    assert running.wait() == 130
    assert place.last_checkpoint(name) == 0
    assert "Interrupted" not in running.log.read_text()


@pytest.mark.parametrize(
    ("launcher", "end"),
    [
        pytest.param("num_processes", lambda running: running.main.kill(), marks=pytest.mark.slow),
        pytest.param(
            "num_processes", lambda running: os.killpg(running.main.pid, signal.SIGHUP), marks=pytest.mark.slow
        ),
        pytest.param("deepspeed", lambda running: running.main.terminate(), marks=pytest.mark.slow),
        ("torchrun", Running.press_ctrl_c),
    ],
    ids=["num_processes SIGKILL", "num_processes SIGHUP", "deepspeed SIGTERM", "torchrun SIGINT"],
)
def test_ranks_save_and_end_with_their_launcher(place, launcher, end):
    name = place.new_name("orphans")
    running = place.start(name, launcher, **ENDLESS)
    running.wait_for_a_step()
    end(running)
    assert running.wait() != 0
    assert place.last_checkpoint(name) == place.last_step(name) > 0


def test_ctrl_c_while_ranks_are_starting_leaves_nothing(place):
    name = place.new_name("early")
    running = place.start(name, "num_processes", **ENDLESS)
    wait_until(lambda: len(running.ranks()) == 2, what="both ranks are there", running=running)
    running.press_ctrl_c()
    assert running.wait() == 130
    assert place.last_step(name) == 0


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_from_all_ranks(place, tmp_path):
    mounted = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a small disk")
    try:
        running = place.start("full", "num_processes", ckpt_path=str(tmp_path))
        assert running.wait() == 1
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
    said = [line for line in running.log.read_text().splitlines() if line.startswith("rlhf sft: ")]
    assert len(said) == 1
    assert f"not enough disk space for a checkpoint in {tmp_path}" in said[0]
    assert place.last_step("full") == SAVE_STEPS


def test_an_earlier_run_is_not_replaced_whoever_starts_the_ranks(place, finished):
    name = finished("one process")
    before = place.weights(name)
    running = place.start(name, "deepspeed")
    assert running.wait() != 0
    assert "contains an earlier run (config.yaml): resume it with --load_checkpoint" in running.log.read_text()
    assert place.weights(name) == before
