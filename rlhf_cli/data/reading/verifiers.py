"""Tasks of an environment of the package verifiers (0.4.0) as rows, read by the interpreter that has the package.

Its requirements conflict with ours (mcp 2.0, openai below 3), so it is installed in a Python environment of its own.
"""

import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rlhf_cli.config.queries import VERIFIERS_PREFIX
from rlhf_cli.data.reading.files import Table, read_file
from rlhf_cli.errors import LONGEST_REASON, UsageError

INTERPRETER = "RLHF_VERIFIERS_PYTHON"
"""Environment variable with the command of the interpreter that has verifiers and the package of the environment."""
_PROGRAM = Path(__file__).parents[2] / "agents" / "verifiers_worker.py"
_BAD_NAME = 2
_INSTALL = (
    f"python -m venv ~/verifiers && ~/verifiers/bin/pip install verifiers==0.4.0 && "
    f"export {INTERPRETER}=~/verifiers/bin/python"
)


def worker_command(name: str, action: str, *arguments: str) -> list[str]:
    """Return the command of the worker program (agents/verifiers_worker.py) for `verifiers:NAME`.

    Raises:
        UsageError: there is no interpreter with verifiers.
    """
    written = os.environ.get(INTERPRETER)
    if written is None and find_spec("verifiers") is None:
        raise UsageError(f"{name}: verifiers is not installed in a Python environment of its own: {_INSTALL}")
    words = [sys.executable] if written is None else shlex.split(written)
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"{name}: {INTERPRETER} {written!r} is not the path of an interpreter: {_INSTALL}")
    return [*words, "-P", str(_PROGRAM), action, name.removeprefix(VERIFIERS_PREFIX), *arguments]


@functools.cache
def check_environment(name: str) -> None:
    """Load an environment in a process. Raises UsageError if that fails."""
    _run(name, "check")


@functools.cache
def read_tasks(name: str) -> Table:
    """Read the tasks of `verifiers:NAME?SETTING=VALUE&...`.

    Columns: `prompt` (messages), `task` (the fields of its TaskData that have no default) and `data_source`.

    Raises:
        UsageError: verifiers or the environment is not installed, a setting is wrong, or the tasks cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder:
        path = Path(folder) / "tasks.jsonl"
        _run(name, "rows", str(path))
        # The mapped file stays readable after its folder is removed.
        return replace(read_file(path), path=name, place=lambda index: f"task {index}", checksum=None)


def _run(name: str, action: str, *arguments: str) -> None:
    command = worker_command(name, action, *arguments)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = (done.stderr if done.returncode != _BAD_NAME else done.stdout).strip().splitlines()
    if done.returncode == _BAD_NAME and lines:
        raise UsageError(f"{name} {lines[-1]}")
    if done.returncode != 0:
        reason = (lines or [f"exit code {done.returncode}"])[-1][:LONGEST_REASON]
        raise UsageError(f"{name} could not be loaded by {command[0]} ({INTERPRETER}): {reason}")
