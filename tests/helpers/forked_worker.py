"""Ray workers forked from a process that has already imported all libraries.

Imports are four fifths of the CPU time of a worker on a tiny model. Ray runs this file as a program instead of its own
`setup_worker.py`: it hands the worker's command line, environment and files to the server, and ends. Ray identifies a
worker by the process ID with which it registers.
"""

import json
import os
import runpy
import signal
import socket
import sys
from ctypes import CDLL
from functools import partialmethod
from typing import NoReturn

ADDRESS = "RLHF_TEST_FORKED_WORKERS"
"""Environment variable with the name of the server's socket."""
PR_SET_PDEATHSIG = 1


def start_worker_server() -> str:
    """Fork a server from this process, whose imports its workers have. Returns the name of its socket.

    Ray itself must not be imported yet: it reads a worker's environment at its import.
    """
    assert "ray" not in sys.modules
    name = f"rlhf-workers-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")  # no file, so nothing is left
    listener.listen(64)
    if os.fork() == 0:
        CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _serve(listener)
    listener.close()
    return name


def use_worker_server(name: str) -> None:
    """Start the workers of this process's Ray clusters by the server, and no autoscaler and no log forwarding."""
    from ray._private.parameter import RayParams

    os.environ[ADDRESS] = name
    chosen = {"setup_worker_path": __file__, "include_log_monitor": False, "no_monitor": True}
    RayParams.__init__ = partialmethod(RayParams.__init__, **chosen)  # type: ignore[method-assign]


def _serve(listener: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are reaped at once
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _run(connection)
        connection.close()


def _run(connection: socket.socket) -> NoReturn:
    """Become the worker: what `setup_worker.py` of Ray does, without a new interpreter."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    request = json.loads(start + connection.makefile("rb").read())
    # A terminal's signals reach the process group of a command; the mask protects the workers from some of them.
    os.setpgid(0, request["group"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])

    from ray._private.runtime_env.context import RuntimeEnvContext  # reads the environment at its import
    from ray._private.utils import update_envs
    from ray._private.workers.setup_worker import parser

    options, sys.argv = parser.parse_known_args(request["words"])
    update_envs(RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}").env_vars)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def _request_worker() -> None:
    request: dict[str, object] = {"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    request |= {"group": os.getpgrp(), "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ()))}
    content = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + os.environ[ADDRESS])
        sent = socket.send_fds(connection, [content], [0, 1, 2])
        connection.sendall(content[sent:])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the group must exist until the worker has joined it


if __name__ == "__main__":
    _request_worker()
