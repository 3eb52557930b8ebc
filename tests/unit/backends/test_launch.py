"""The command line that starts ranks, and signal handling in a rank."""

import base64
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rlhf_cli.backends.process.launch import launch_command
from rlhf_cli.backends.process.signals import StopSignal
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.stop_notice import stop_announced


def devices_of(command: list[str]) -> list[str]:
    (world,) = [word.removeprefix("--world_info=") for word in command if word.startswith("--world_info=")]
    return json.loads(base64.urlsafe_b64decode(world))["localhost"]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, ["0", "1"]),
        ("3,5,7", ["3", "5"]),
        ("GPU-4a,GPU-9c", ["GPU-4a", "GPU-9c"]),
        ("", ["-1", "-1"]),  # hidden GPUs stay hidden: the launcher overwrites CUDA_VISIBLE_DEVICES
        ("-1", ["-1", "-1"]),
    ],
)
def test_ranks_get_the_first_visible_devices(visible, chosen):
    assert devices_of(launch_command(2, ["sft"], devices=visible)) == chosen


def test_more_ranks_than_visible_devices_are_refused():
    with pytest.raises(UsageError, match="--num_processes 4: CUDA_VISIBLE_DEVICES=0,1 shows only 2"):
        launch_command(4, ["sft"], devices="0,1")


def test_ranks_run_the_same_command():
    command = launch_command(2, ["sft", "--seed", "1"], devices=None)
    assert command[command.index("--module") :] == ["--module", "rlhf_cli", "sft", "--seed", "1"]


@pytest.fixture
def stop():
    stop = StopSignal(echo_seconds=0.2)
    yield stop
    stop.restore()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_request_to_stop(stop, signum):
    assert not stop()
    os.kill(os.getpid(), signum)
    assert stop()


def test_the_first_signal_is_answered_and_a_print_that_it_interrupted_may_refuse(stop):
    said = []

    def refuse() -> None:
        said.append("first")
        raise RuntimeError("reentrant call inside a print")

    stop.on_request = refuse
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), signum)
    assert said == ["first"]
    assert stop()


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_signal_is_announced_within_its_block_alone(stop, is_behind):
    said: list[str] = []
    with stop_announced(stop, said.append, "a step is done"):
        if not is_behind:
            os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert said == ([] if is_behind else ["The run ends as soon as a step is done; a second Ctrl-C ends it at once"])
    assert stop()


def test_what_a_launcher_repeats_says_nothing_new(stop):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # torchrun
    time.sleep(0.25)
    os.kill(os.getpid(), signal.SIGTERM)  # deepspeed
    assert stop()


ENDS = """
import os, signal, time
from rlhf_cli.backends.process.signals import StopSignal
StopSignal(echo_seconds={echo})
os.kill(os.getpid(), signal.{first})
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGINT)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("first", "echo", "status"), [("SIGINT", 0.0, 130), ("SIGTERM", 0.0, 130), ("SIGINT", 0.1, 130), ("SIGINT", 60, 0)]
)
def test_a_second_ctrl_c_ends_the_process_at_once(first, echo, status):
    ended = subprocess.run([sys.executable, "-c", ENDS.format(echo=echo, first=first)], check=False, timeout=120)
    assert ended.returncode == status


def test_the_signals_are_given_back():
    before = signal.getsignal(signal.SIGINT)
    StopSignal().restore()
    assert signal.getsignal(signal.SIGINT) == before


APART = """
import os, signal, subprocess, sys
from rlhf_cli.backends.process.signals import StopSignal, children_apart
stop, group = StopSignal(), os.getpgrp()
with children_apart():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(15))  # as ray.init does
    child = subprocess.Popen(["sleep", "60"])
assert os.getpgrp() == group
assert (os.getpgid(child.pid) != group) == (group != os.getpid())
os.kill(child.pid, signal.SIGHUP)
os.kill(os.getpid(), signal.{signum})
assert stop()
assert child.poll() is None
child.kill()
"""


@pytest.mark.parametrize("is_leader", [True, False])
@pytest.mark.parametrize("signum", ["SIGTERM", "SIGHUP"])
def test_children_started_apart_outlive_a_closed_terminal_and_the_handlers_stay(signum, is_leader):
    program = [sys.executable, "-c", APART.format(signum=signum)]
    ended = subprocess.run(program, check=False, timeout=120, process_group=0 if is_leader else None)
    assert ended.returncode == 0


MASK = """
import signal
from contextlib import suppress
from rlhf_cli.backends.process.signals import children_apart
def present():
    return signal.pthread_sigmask(signal.SIG_BLOCK, set())
for blocked in (set(), {signal.SIGHUP}, {signal.SIGUSR1}):
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    with children_apart():
        assert present() == blocked | {signal.SIGHUP}
    assert present() == blocked
    with suppress(RuntimeError), children_apart():
        raise RuntimeError("Ray did not start")
    assert present() == blocked
"""


def test_the_signals_that_were_blocked_before_children_were_started_apart_are_blocked_after():
    ended = subprocess.run([sys.executable, "-c", MASK], check=False, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_nohup_is_respected():
    program = "import os, signal; from rlhf_cli.backends.process.signals import StopSignal; stop = StopSignal(); "
    program += "os.kill(os.getpid(), signal.SIGHUP); assert not stop()"
    ended = subprocess.run(["nohup", sys.executable, "-c", program], check=False, timeout=120, capture_output=True)
    assert ended.returncode == 0, ended.stderr


def test_ctrl_c_while_the_program_is_imported_is_one_line():
    program = "import sys, _thread, importlib.abc\n"
    program += "class Late(importlib.abc.MetaPathFinder):\n"
    program += "    def find_spec(self, name, path, target=None):\n"
    program += "        if name == 'rlhf_cli.cli': raise KeyboardInterrupt\n"
    program += "sys.meta_path.insert(0, Late())\n"
    program += "from rlhf_cli.__main__ import main\nsys.exit(main())"
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=120, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "rlhf: interrupted\n")
