"""Helpers to start, inspect and kill commands, and to compare two runs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from safetensors.torch import load_file

from rlhf_cli.tracking.sinks import read_metrics

MEASURED = ("time/", "perf/", "memory/")
CORE = ("EngineCore", "spawn_main")
"""Command words of vLLM's core: its title, which setproctitle cannot always set, or the original command."""


def rlhf(*words: str, under: Sequence[str] = (), **options) -> subprocess.Popen:
    """Start an `rlhf` command with one thread per process, so that sums are reproducible.

    Args:
        under: launcher command, if any.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*under, sys.executable, "-m", "rlhf_cli", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen) -> str:
    """Wait for a command to succeed, and return its output."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def plain_metrics(output: Path) -> dict:
    """Return the metrics that must match in equal runs."""
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}
        for step, metrics in read_metrics(output).items()
    }


def assert_same_run(first: Path, second: Path) -> None:
    """Compare metrics, saved weights or adapters, and samples of two runs."""
    assert plain_metrics(first) == plain_metrics(second)
    weights, others = (load_file(next((run / "model").glob("*model.safetensors"))) for run in (first, second))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.equal(others[name]), name
    assert (first / "samples.jsonl").read_text() == (second / "samples.jsonl").read_text()


def processes_of(output: Path) -> list[str]:
    """Return processes with an open file in the run's folder, or with the folder in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            opened = [file.path for file in process.open_files()]
            if any(path.startswith(str(output)) for path in opened) or str(output) in " ".join(process.cmdline()):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except psutil.Error:
            continue
    return found


def wait_for(path: Path, process: subprocess.Popen, *, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def engine_process(output: Path, backend: str, *, seconds: float = 20) -> psutil.Process:
    """Return the generating process: vLLM's core, or the Ray worker with the transformers engine."""
    kinds = CORE if backend == "vllm" else ("Worker",)
    return writer_of(output / "logs" / "engine-0.log", *kinds, seconds=seconds)


def writer_of(path: Path, *kinds: str, seconds: float = 20) -> psutil.Process:
    """Return the process that writes this log and has one of these words in its command.

    Polls, because a process that is starting another one has no readable files for a moment.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in psutil.process_iter():
            if writes_to(path, process) and any(kind in command_of(process) for kind in kinds):
                return process
        time.sleep(0.1)
    raise AssertionError(f"no process writes to {path}: {processes_of(path.parent)}")


def writes_to(path: Path, process: psutil.Process) -> bool:
    for number in (1, 2):
        with suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/{number}") == str(path):
                return True
    return False


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def halted(process: subprocess.Popen) -> Iterator[None]:
    """Pause the driver in the block, so that the run does not end before one of its processes is found and killed."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
