"""Several ranks on this machine by the deepspeed launcher, stopped and ended together."""

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
from rlhf_cli.backends.training.distributed_env import free_port
from rlhf_cli.errors import OutOfMemory, UsageError, memory_sentence

GRACE_SECONDS = 5
LOOK_SECONDS = 1.0
REPEAT_SECONDS = 2.0
LAUNCHER = "deepspeed.launcher.launch"


def run_ranks(num_processes: int, arguments: list[str]) -> int:
    """Return the exit status of `rlhf <arguments>` on this many ranks.

    The launcher kills its ranks when it is interrupted. So it runs in a session of its own, out of the terminal's
    reach, and the signals that ask for a stop are passed on to the ranks alone, which finish their step and save.
    """
    launcher = subprocess.Popen(
        launch_command(num_processes, arguments, devices=os.environ.get("CUDA_VISIBLE_DEVICES")),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    asked: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and asked:
            _end_session(launcher.pid, grace=0)
            return
        asked.append(signum)
        if not _signal_ranks(launcher, signum):
            launcher.terminate()

    for signum in stop_signals():
        signal.signal(signum, pass_on)
    try:
        while (status := _wait(launcher)) is None:
            if asked:  # ranks that were being started may have lost it; those that got it ignore a SIGTERM
                _signal_ranks(launcher, signal.SIGTERM)
    finally:
        _end_session(launcher.pid, grace=GRACE_SECONDS)
    if status != 0 and asked:
        return INTERRUPTED
    check_killed(status, for_memory=kernel_has_killed())
    return status if status in (0, 1, 2, INTERRUPTED) else 1


def check_killed(status: int, *, for_memory: bool) -> None:
    """Raise OutOfMemory if the status of a launcher means that a signal of full memory has ended a rank.

    DeepSpeed's launcher ends with the status of its rank: the number of the signal below 0, of which a byte is left.
    """
    if status % 256 == -signal.SIGKILL % 256 and for_memory:
        raise OutOfMemory(memory_sentence("host memory", "on this machine, whose kernel has killed a rank"))
    if status % 256 == -signal.SIGBUS % 256:
        raise OutOfMemory(memory_sentence("space in /dev/shm", "in a rank"))


def _wait(launcher: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status; None if the process still runs after a moment."""
    with suppress(subprocess.TimeoutExpired):
        return launcher.wait(timeout=REPEAT_SECONDS)
    return None


def _signal_ranks(launcher: subprocess.Popen[bytes], signum: int) -> bool:
    """Send the signal to all ranks; whether there is any."""
    ranks = _children(launcher.pid)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signum)
    return bool(ranks)


def launch_command(num_processes: int, arguments: list[str], *, devices: str | None) -> list[str]:
    """Return the deepspeed launcher's command line for ranks of `rlhf <arguments>` on this machine.

    Args:
        devices: CUDA_VISIBLE_DEVICES, which the launcher replaces; "" and "-1" hide all GPUs.

    Raises:
        UsageError: fewer devices are visible than ranks are wanted.
    """
    names = [str(index) for index in range(num_processes)] if devices is None else devices.split(",")
    if names[0] in ("", "-1"):
        names = ["-1"] * num_processes
    if len(names) < num_processes:
        raise UsageError(f"--num_processes {num_processes}: CUDA_VISIBLE_DEVICES={devices} shows only {len(names)}")
    world = base64.urlsafe_b64encode(json.dumps({"localhost": names[:num_processes]}).encode()).decode()
    options = [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    options += ["--log_level=critical"]  # it would add the whole command line to a rank's one sentence
    return [sys.executable, "-m", LAUNCHER, *options, "--module", "rlhf_cli", *arguments]


def stop_with_launcher() -> None:
    """Ask this rank to stop, as Ctrl-C does, once the launcher that has started it is gone.

    A launcher that is killed, or `deepspeed` that gets a SIGTERM, leaves its ranks running.
    """
    threading.Thread(target=_watch, args=(_launchers(),), name="launcher-watch", daemon=True).start()


def _launchers() -> list[psutil.Process]:
    """Return the process that has started this rank; for deepspeed's two launchers, the one that has started that one
    too.
    """
    parent = psutil.Process().parent()
    if parent is None:
        return []
    above = parent.parent() if LAUNCHER in parent.cmdline() else None
    return [parent] if above is None else [parent, above]


def _watch(launchers: list[psutil.Process]) -> None:
    while all(_is_alive(launcher) for launcher in launchers):
        time.sleep(LOOK_SECONDS)
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
    """End the remaining processes of the launcher's session; usually nothing."""
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
