"""Runs the --on_event command when a run starts, ends, fails or raises an alarm."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from rlhf_cli.backends.process.signals import INTERRUPTED, stop_signals
from rlhf_cli.backends.training.distributed_env import is_reported_by_parent, rank_and_world_size
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.environment import without_secrets
from rlhf_cli.errors import UsageError, one_line
from rlhf_cli.runs.recorded_runs import read_run
from rlhf_cli.tracking.sinks import RUN_FILE

Kind = Literal["start", "end", "failure", "alarm"]
EVENT_SECONDS = 10.0
"""Time limit of the command, after which it is killed."""
_SIGNAL_STATUS = 128
"""A process that a signal ends has this exit status plus the number of the signal, in a shell."""


@contextmanager
def with_events(config: CommandConfig) -> Iterator[Callable[[], None]]:
    """Report when the block ends or fails, and yield a function that reports the start.

    Does nothing without --on_event, and in ranks whose launcher or first rank reports.
    """
    command = config.setting("on_event")
    if not command or is_reported_by_parent() or rank_and_world_size()[0] != 0:
        yield _ignore
        return
    events = _Events(str(command), config, began=time.time())
    with _raising_signals():
        try:
            yield lambda: events.send("start")
        except BaseException as error:
            events.send(*_kind_of(error))
            raise
    events.send("end", "finished")


def _ignore(message: str = "") -> None:
    """Report nothing."""


def alarm_event(config: CommandConfig) -> Callable[[str], None]:
    """Return a function that reports an alarm with its message, without waiting for the command."""
    command = config.setting("on_event")
    if not command:
        return _ignore
    events = _Events(str(command), config, began=0.0)
    return lambda message: threading.Thread(target=events.send, args=("alarm", message)).start()


def _kind_of(error: BaseException) -> tuple[Kind, str]:
    """Return event kind and message."""
    if isinstance(error, SystemExit):
        interrupted = {INTERRUPTED, *(_SIGNAL_STATUS + signum for signum in stop_signals())}
        if not error.code:
            return "end", "finished"
        return ("end", "interrupted") if error.code in interrupted else ("failure", f"exit status {error.code}")
    if isinstance(error, KeyboardInterrupt):
        return "end", "interrupted"
    return "failure", without_secrets(one_line(error))


@contextmanager
def _raising_signals() -> Iterator[None]:
    """Let signals that would end the process raise SystemExit, until the run handles them itself."""

    def raised(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(_SIGNAL_STATUS + signum)

    default = [signum for signum in stop_signals() if signal.getsignal(signum) is signal.SIG_DFL]
    for signum in default:
        signal.signal(signum, raised)
    try:
        yield
    finally:
        for signum in default:
            # Keep handlers that the run has set.
            if signal.getsignal(signum) is raised:
                signal.signal(signum, signal.SIG_DFL)


@dataclass(frozen=True)
class _Events:
    """Reports events. `began`: start time in seconds since the epoch."""

    command: str
    config: CommandConfig
    began: float

    def send(self, kind: Kind, message: str = "") -> None:
        """Run the command with an event. A failure of the command is a line on stderr."""
        root = Path(self.config.setting("output")).absolute()
        event = {
            "event": kind,
            "message": message,
            "command": self.config.command,
            "model": self.config.setting("pretrain"),
            "output": str(root),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "run": None if kind == "start" else self._record(root),
        }
        variables = {"RLHF_EVENT": kind, "RLHF_OUTPUT_DIR": str(root), "RLHF_COMMAND": self.config.command}
        if problem := run_event(self.command, event, variables):
            print(f"rlhf {self.config.command}: --on_event at the {kind}: {problem}", file=sys.stderr, flush=True)

    def _record(self, root: Path) -> dict[str, object] | None:
        """Return the run's record; None if it has not written one."""
        try:
            # A run that fails early leaves an earlier record in the folder.
            is_own = (root / RUN_FILE).stat().st_mtime >= self.began
            return read_run(root).as_json() if is_own else None
        except (OSError, UsageError):
            return None


def run_event(
    command: str, event: Mapping[str, object], variables: Mapping[str, str], *, seconds: float = EVENT_SECONDS
) -> str:
    """Run a shell command with an event as JSON on stdin. Returns a phrase if it fails or exceeds the time limit.

    Args:
        command: the user's command.
        event: JSON values.
        variables: environment variables, in addition to those of this process.
        seconds: time limit.
    """
    # Files instead of pipes: a child in the background would keep a pipe open, and reading would wait for it.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as written:
        given.write(json.dumps(event).encode())
        given.seek(0)
        try:
            # A separate session: the command gets no Ctrl-C, and can be killed with all children.
            process = subprocess.Popen(
                command,
                shell=True,
                stdin=given,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **variables},
            )
            status = process.wait(timeout=seconds)
        except OSError as error:
            return f"not started ({error.strerror})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {seconds:g} s"
        written.seek(0)
        last = next(reversed(written.read().decode(errors="replace").split("\n")[:-1]), "")
    return f"exit status {status}{last and ': '}{last[:200]}" if status else ""
