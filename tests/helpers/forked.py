"""`rlhf` commands that are forked from one process that has imported their libraries.

A command imports torch, transformers and the program for five seconds before it does anything. Tests that look at the
output of a command, or that stop it with a signal, need not wait for that each time. Tests of launchers and of a second
Ctrl-C start their own processes.

The server is this file as a program: it reads one request a line, forks, and answers with the process id and, when the
command has ended, with the exit status. One command runs at a time.
"""

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

IMPORTED = (
    "deepspeed",
    "peft.auto",
    "rlhf_cli.backends.roles.ranks",
    "rlhf_cli.commands.eval",
    "rlhf_cli.commands.generate",
    "rlhf_cli.runs.offline.run",
    "rlhf_cli.runs.online.run",
)
RAYS_MODE = "RAY_AUTH_MODE"
"""Ray sets it in a process that has started a cluster, as tests do. A forked command, in which Ray is imported already,
would start a cluster that wants tokens and show none.
"""
SECONDS = 600.0
"""After which a command counts as hanging."""


def run_rlhf(*words: object, status: int = 0, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its text on both outputs.

    Args:
        words: the command's words, without `rlhf`.
        status: the exit status that the command must have.
        environment: variables that the command has besides the variables of this process.
    """
    with started_rlhf(*words, environment=environment, is_leader=False) as command:
        return command.finish(status=status)


@contextmanager
def started_rlhf(
    *words: object, environment: Mapping[str, str] | None = None, is_leader: bool = True
) -> Iterator["Command"]:
    """Start a command; if it has not ended when the block ends, kill it.

    Args:
        is_leader: the command leads a process group of its own, as a shell starts it in a terminal.
    """
    server = _server()
    with tempfile.TemporaryFile("w+") as output:
        request: dict[str, object] = {
            "words": [str(word) for word in words],
            "environment": _inherited() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(environment or {}),
            "output": f"/proc/{os.getpid()}/fd/{output.fileno()}",
            "is_leader": is_leader,
        }
        server.requests.write(json.dumps(request) + "\n")
        server.requests.flush()
        command = Command(int(server.answers.readline()), server.answers, output)
        try:
            yield command
        finally:
            command.kill()


class Command:
    """A started command."""

    def __init__(self, pid: int, answers: IO[str], output: IO[str]) -> None:
        self._pid = pid
        self._answers = answers
        self._output = output
        self._status: int | None = None

    def is_running(self) -> bool:
        return psutil.pid_exists(self._pid)  # the server takes the exit status of a command at once

    def printed(self) -> str:
        """Return the text of the command on both outputs up to now."""
        self._output.seek(0)
        return self._output.read()

    def stop(self, signum: signal.Signals) -> None:
        """Send a signal as its usual sender does: a terminal to the whole group, `kill` to the one process."""
        if signum == signal.SIGTERM:
            os.kill(self._pid, signum)
        else:
            os.killpg(self._pid, signum)

    def finish(self, *, status: int = 0, seconds: float = SECONDS) -> str:
        """Wait for the end of the command, which must have this exit status; return its text."""
        found = self._wait(seconds)
        assert found == status, self.printed()
        return self.printed()

    def kill(self) -> None:
        """Kill the command if it runs."""
        if self._status is None:
            self._wait(0)

    def _wait(self, seconds: float) -> int:
        """Return the exit status of the command, which is killed after so many seconds."""
        watch = threading.Timer(seconds, self._send_kill)
        watch.start()
        try:
            self._status = int(self._answers.readline())
        finally:
            watch.cancel()
        return self._status

    def _send_kill(self) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(self._pid, signal.SIGKILL)


@dataclass(frozen=True)
class Server:
    """The process that forks, and the pipes to it."""

    requests: IO[str]
    answers: IO[str]


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != RAYS_MODE}


@functools.cache
def _server() -> Server:
    """Start the process that forks. It is no child of this one, whose children tests count; it ends with the pipe."""
    environment = _inherited() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve())]
    starter = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    starter.wait()
    assert starter.stdin is not None
    assert starter.stdout is not None
    return Server(starter.stdin, starter.stdout)


def serve() -> None:
    """Import everything, then fork for each request, one after the other."""
    if os.fork():
        os._exit(0)  # the process that started this one waits for it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an imported package prints is no answer
    sys.path.remove(str(Path(__file__).resolve().parent))
    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a process with threads must not fork"  # pyarrow's allocator may have its own
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        print(child, file=answers, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(request: dict) -> None:
    """Be the command: its words, environment and outputs, and no input."""
    if request["is_leader"]:
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    sys.argv = ["rlhf", *request["words"]]
    from rlhf_cli.__main__ import main

    sys.exit(main())


if __name__ == "__main__":
    serve()
