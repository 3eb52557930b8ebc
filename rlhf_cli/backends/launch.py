"""Several ranks on this machine by the deepspeed launcher, stopped and ended together."""

import os
import signal
import subprocess
import sys
from types import FrameType

import psutil

from rlhf_cli.backends.distributed_env import free_port
from rlhf_cli.backends.signals import INTERRUPTED

GRACE_SECONDS = 5


def run_ranks(num_processes: int, arguments: list[str]) -> int:
    """Exit status of `rlhf <arguments>` on this many ranks.

    The launcher kills its ranks when it is interrupted. So it runs in a session of its own, out of the terminal's
    reach, and Ctrl-C and SIGTERM are passed on to the ranks alone, which finish their step and save.
    """
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(num_processes)]
    command += ["--master_port", str(free_port()), "--module", "rlhf_cli", *arguments]
    launcher = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    interrupts = 0

    def pass_on(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        for rank in _ranks(launcher.pid):
            rank.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)
    try:
        status = launcher.wait()
    finally:
        _end_session(launcher.pid)
    return INTERRUPTED if interrupts else status


def _ranks(launcher_pid: int) -> list[psutil.Process]:
    return [process for process in _descendants(launcher_pid) if "RANK" in _environment(process)]


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _end_session(session: int) -> None:
    """End what is left of the launcher's session; usually nothing."""
    left = [process for process in psutil.process_iter() if _session(process) == session]
    for process in left:
        process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=GRACE_SECONDS)
    for process in stubborn:
        process.kill()


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None
