"""`rlhf` commands that have to run to their end, forked from one process that has imported what they need.

A command imports torch, transformers and the program for five seconds before it does anything. Tests that look at what
a command leaves need not wait for that each time. Tests of signals, kills and launchers start their own processes.

The server is this file as a program: it reads one request a line, forks, and answers with the exit status.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

IMPORTED = (
    "deepspeed",
    "peft.auto",
    "rlhf_cli.backends.roles.ranks",
    "rlhf_cli.commands.eval",
    "rlhf_cli.commands.generate",
    "rlhf_cli.runs.offline.run",
    "rlhf_cli.runs.online.run",
)
SECONDS = 600.0
"""After which a command counts as hanging."""


def run_rlhf(*words: object, status: int = 0, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it prints on both outputs.

    Args:
        words: the command's words, without `rlhf`.
        status: the exit status that the command must have.
        environment: variables that the command has besides those of this process.
    """
    with tempfile.TemporaryFile("w+") as output:
        request: dict[str, object] = {
            "words": [str(word) for word in words],
            "environment": os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(environment or {}),
            "output": f"/proc/{os.getpid()}/fd/{output.fileno()}",
        }
        found = _answer(_server(), request)
        output.seek(0)
        printed = output.read()
    assert found == status, printed
    return printed


@dataclass(frozen=True)
class Server:
    """The process that forks, and the pipes to it."""

    pid: int
    requests: IO[str]
    answers: IO[str]


@functools.cache
def _server() -> Server:
    """Start the process that forks. It is no child of this one, whose children tests count; it ends with the pipe."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve())]
    starter = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    starter.wait()
    assert starter.stdin is not None
    assert starter.stdout is not None
    return Server(int(starter.stdout.readline()), starter.stdin, starter.stdout)


def _answer(server: Server, request: dict[str, object]) -> int:
    """Return the exit status of a command; kill the server, so that its pipe ends, if the command hangs."""
    server.requests.write(json.dumps(request) + "\n")
    server.requests.flush()
    watch = threading.Timer(SECONDS, os.killpg, (server.pid, signal.SIGKILL))
    watch.start()
    try:
        return int(server.answers.readline())
    finally:
        watch.cancel()


def serve() -> None:
    """Import everything, then fork for each request, one after the other."""
    if os.fork():
        os._exit(0)  # the process that started this one waits for it
    os.setpgid(0, 0)
    answers = os.fdopen(os.dup(1), "w")
    print(os.getpid(), file=answers, flush=True)
    os.dup2(2, 1)  # what an imported package prints is no answer
    sys.path.remove(str(Path(__file__).resolve().parent))
    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a process with threads must not fork"  # pyarrow's allocator may have its own
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(request: dict) -> None:
    """Be the command: its words, environment and outputs, and no input."""
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
