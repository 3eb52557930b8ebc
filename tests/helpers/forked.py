"""`rlhf` commands forked from a process that has already imported all libraries.

Imports take a command five seconds. Tests that check output or send signals avoid this delay by forking. The launcher
and the ranks of `--num_processes` are forked from the command. Tests of launchers and of a second Ctrl-C start separate
processes.

The server runs this file as a program: it reads one request per line, forks, and replies with the process ID, and with
the exit status when the command ends. Commands run one at a time.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil
from forked_worker import start_worker_server, use_worker_server

IMPORTED_BY_WORKERS = (
    "deepspeed",
    "peft.auto",
    "rlhf_cli.backends.roles.ranks",
    "rlhf_cli.backends.rollout.transformers_engine",
)
IMPORTED = (
    "rlhf_cli.runs.inference.evaluate",
    "rlhf_cli.runs.inference.generate",
    "rlhf_cli.runs.offline.run",
    "rlhf_cli.runs.online.run",
)
RAYS_MODE = "RAY_AUTH_MODE"
"""Ray sets this variable in a process that has started a cluster, as tests do. A forked command, with Ray already
imported, would otherwise start a cluster that requires tokens but provides none.
"""
SECONDS = 600.0
"""Time after which a command counts as hanging."""


def run_rlhf(*words: object, status: int = 0, environment: Mapping[str, str] | None = None) -> str:
    """Run a command, and return the text of both outputs.

    Args:
        words: arguments after `rlhf`.
        status: required exit status.
        environment: additional environment variables.
    """
    with started_rlhf(*words, environment=environment, is_leader=False) as command:
        return command.finish(status=status)


@contextmanager
def started_rlhf(
    *words: object, environment: Mapping[str, str] | None = None, is_leader: bool = True
) -> Iterator["Command"]:
    """Start a command. Kill it if it is still running at the end of the block.

    Args:
        is_leader: give the command its own process group, like a shell in a terminal does.
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

    @property
    def pid(self) -> int:
        return self._pid

    def is_running(self) -> bool:
        return psutil.pid_exists(self._pid)  # the server reaps commands at once

    def printed(self) -> str:
        """Return the output printed so far."""
        self._output.seek(0)
        return self._output.read()

    def stop(self, signum: signal.Signals) -> None:
        """Send a signal like its usual sender: a terminal to the process group, `kill` to one process."""
        if signum == signal.SIGTERM:
            os.kill(self._pid, signum)
        else:
            os.killpg(self._pid, signum)

    def kill_with_children(self) -> None:
        """Kill the command and every process that it has started with SIGKILL, as a power failure does."""
        command = psutil.Process(self._pid)
        processes = [*command.children(recursive=True), command]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)

    def finish(self, *, status: int = 0, seconds: float = SECONDS) -> str:
        """Wait for the command to end with this exit status, and return its output."""
        found = self._wait(seconds)
        assert found == status, self.printed()
        return self.printed()

    def kill(self) -> None:
        """Kill the command if it is running."""
        if self._status is None:
            self._wait(0)

    def _wait(self, seconds: float) -> int:
        """Return the exit status. Kills the command after `seconds`."""
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
    """The forking process, with pipes to it."""

    requests: IO[str]
    answers: IO[str]


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != RAYS_MODE}


@functools.cache
def _server() -> Server:
    """Start the forking process. It is not a child of this process, because tests count children; it ends with the
    pipe.
    """
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
    """Import everything, then fork for each request in turn."""
    if os.fork():
        os._exit(0)  # the parent process waits for it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imported packages is not a reply
    sys.path.remove(str(Path(__file__).resolve().parent))
    for name in IMPORTED_BY_WORKERS:
        importlib.import_module(name)
    workers = start_worker_server()
    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, (
        "a process with threads must not fork"
    )  # pyarrow's allocator may have a thread
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line), workers)
        print(child, file=answers, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(request: dict, workers: str) -> None:
    """Run the command with its arguments, environment and outputs, without input.

    Args:
        workers: name of the server of its Ray workers.
    """
    if request["is_leader"]:
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    use_worker_server(workers)
    subprocess.Popen = ForkedPython  # type: ignore[assignment, misc]
    sys.argv = ["rlhf", *request["words"]]
    from rlhf_cli.__main__ import main

    sys.exit(main())


class ForkedPython(subprocess.Popen):
    """Forks this process instead of starting an interpreter for DeepSpeed's launcher and its ranks."""

    def __init__(self, command: Any, **options: Any) -> None:
        match command:
            case [_, "-m", "deepspeed.launcher.launch", *_] | [_, "-u", "-m", "rlhf_cli", *_]:
                sys.stdout.flush()  # the fork would print the buffer a second time
                module = command[command.index("-m") + 1 :]
                options["preexec_fn"] = functools.partial(_run_module, module, options.get("env") or dict(os.environ))
                options["restore_signals"] = False  # the interpreter would ignore SIGPIPE again
        super().__init__(command, **options)


def _run_module(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `python -m` with these words, called in the fork when its files and session are in place."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # includes the pipe whose end tells Popen that a program has started
    gc.enable()  # Popen has disabled it for the fork
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.modules.pop("rlhf_cli.__main__", None)  # runpy warns of modules that it runs a second time
    status: object = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    atexit._run_exitfuncs()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    serve()
