"""Starts multiple ranks on this machine with the deepspeed launcher, and stops them together."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

import psutil

from rlhf_cli.backends.process.killed import kernel_has_killed
from rlhf_cli.backends.process.signals import INTERRUPTED, stop_signals
from rlhf_cli.backends.training.distributed_env import REPORTED_BY_PARENT, free_port
from rlhf_cli.errors import OutOfMemory, Shortage, UsageError

_GRACE_SECONDS = 5
_LOOK_SECONDS = 1.0
_REPEAT_SECONDS = 2.0
_LAUNCHER = "deepspeed.launcher.launch"


def run_ranks(num_processes: int, arguments: list[str]) -> int:
    """Run `rlhf <arguments>` on `num_processes` ranks and return the exit status."""
    # The launcher kills its ranks when it is interrupted. In a separate session, it receives no signals from the
    # terminal. Stop signals are forwarded only to the ranks, which finish the step and save.
    launcher = subprocess.Popen(
        launch_command(num_processes, arguments, devices=os.environ.get("CUDA_VISIBLE_DEVICES")),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, REPORTED_BY_PARENT: "1"},
    )
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        # A second Ctrl-C stops at once.
        if signum == signal.SIGINT and received:
            _end_session(launcher.pid, grace=0)
            return
        received.append(signum)
        # Without ranks, the launcher is still starting, so there is nothing to save.
        if not _signal_ranks(launcher, signum):
            launcher.terminate()

    for signum in stop_signals():
        signal.signal(signum, forward)
    try:
        while (status := _wait(launcher)) is None:
            # Ranks that were starting may have missed the signal. Ranks that are already stopping ignore a SIGTERM.
            if received:
                _signal_ranks(launcher, signal.SIGTERM)
    finally:
        _end_session(launcher.pid, grace=_GRACE_SECONDS)
    if status != 0 and received:
        return INTERRUPTED
    check_killed(status, for_memory=kernel_has_killed())
    return status if status in (0, 1, 2, INTERRUPTED) else 1


def check_killed(status: int, *, for_memory: bool) -> None:
    """Raise OutOfMemory if the launcher's exit status means that a rank was killed, as a full memory does.

    Args:
        for_memory: whether the kernel has counted a kill for memory, which containers may hide.
    """
    # DeepSpeed's launcher exits with the rank's return code, which is minus the signal number. The operating system
    # keeps only the lowest byte.
    if status % 256 == -signal.SIGKILL % 256:
        if for_memory:
            raise OutOfMemory(Shortage("host memory", "on this machine, where the kernel has killed a rank"))
        raise OutOfMemory(Shortage("host memory", doubt="a rank was killed with signal 9"))
    if status % 256 == -signal.SIGBUS % 256:
        raise OutOfMemory(Shortage("space in /dev/shm", "in a rank"))


def _wait(launcher: subprocess.Popen[bytes]) -> int | None:
    """Wait up to `_REPEAT_SECONDS` for the exit status; None if the process is still running."""
    with suppress(subprocess.TimeoutExpired):
        return launcher.wait(timeout=_REPEAT_SECONDS)
    return None


def _signal_ranks(launcher: subprocess.Popen[bytes], signum: int) -> bool:
    """Send a signal to all ranks. Returns whether there are any."""
    ranks = _children(launcher.pid)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signum)
    return bool(ranks)


def launch_command(num_processes: int, arguments: list[str], *, devices: str | None) -> list[str]:
    """Build the deepspeed launcher's command line for running `rlhf <arguments>` on this machine.

    Args:
        num_processes: number of ranks.
        arguments: arguments for `rlhf`.
        devices: CUDA_VISIBLE_DEVICES, which the launcher replaces; "" and "-1" hide all GPUs.

    Raises:
        UsageError: there are fewer visible devices than ranks.
    """
    names = [str(index) for index in range(num_processes)] if devices is None else devices.split(",")
    if names[0] in ("", "-1"):
        names = ["-1"] * num_processes
    if len(names) < num_processes:
        raise UsageError(f"--num_processes {num_processes}: CUDA_VISIBLE_DEVICES={devices} shows only {len(names)}")
    world = base64.urlsafe_b64encode(json.dumps({"localhost": names[:num_processes]}).encode()).decode()
    options = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    # At lower levels, the launcher logs the full command line after a rank's error message.
    options += ["--log_level=critical"]
    return [sys.executable, "-m", _LAUNCHER, *options, "--module", "rlhf_cli", *arguments]


def stop_with_launcher() -> None:
    """Stop this rank as with Ctrl-C when the launcher is gone."""
    # If the launcher is killed, or `deepspeed` receives a SIGTERM, the ranks continue to run.
    threading.Thread(target=_watch, args=(_launchers(),), name="launcher-watch", daemon=True).start()


def _launchers() -> list[psutil.Process]:
    """Return the process that started this rank. With deepspeed's two nested launchers, return both."""
    parent = psutil.Process().parent()
    if parent is None:
        return []
    above = parent.parent() if _LAUNCHER in parent.cmdline() else None
    return [parent] if above is None else [parent, above]


def _watch(launchers: list[psutil.Process]) -> None:
    while all(_is_alive(launcher) for launcher in launchers):
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _end_session(session: int, *, grace: float) -> None:
    """Terminate the remaining processes in the launcher's session; normally there are none."""
    left = [process for process in psutil.process_iter() if _session(process) == session]
    for process in left:
        process.terminate() if grace else process.kill()
    _, stubborn = psutil.wait_procs(left, timeout=grace)
    for process in stubborn:
        process.kill()


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None
