"""Task folders of Harbor in containers of docker or podman, as an environment class: `harbor:docker`.

Imported only in environment processes. The process of an episode holds the standard input of its container, which ends
with it, even if the process is killed.
"""

import codecs
import contextlib
import fcntl
import hashlib
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from rlhf_cli.config.queries import parameters_of
from rlhf_cli.data.reading.harbor import HarborTask, read_task
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.records import BadResult

_PROGRAMS = ("docker", "podman")
_DEFAULTS: dict[str, object] = {"command_timeout": 20.0}
_CHUNK = 65_536
_MAX_OUTPUT = 4_000
"""Characters of output that the model receives."""
_TESTS, _LOGS = "/tests", "/logs/verifier"
_PAUSE = 0.1


class _Task:
    """An episode in a container. The model runs commands; at the end, the task's tests give the reward."""

    program: ClassVar[str]
    command_timeout: ClassVar[float]

    def reset(self, task: str) -> None:
        """Start the container of a task folder. The first episode of a task builds its image."""
        self._task = read_task(Path(task))
        image = self._task.image or self._built(self._task)
        self._name = f"rlhf-{uuid.uuid4().hex}"
        options = (*self._task.options, *_names(self._task.variables))
        command = [self.program, "run", "--rm", "--interactive", "--init", "--name", self._name, *options]
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the container
        # `cat` ends at the end of its input, which this process holds.
        self._container = subprocess.Popen(
            [*command, "--entrypoint", "cat", image],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=os.environ | self._task.variables,
        )
        while self._exec(("true",)).returncode != 0:
            if self._container.poll() is not None:
                self._errors.seek(0)
                raise BadResult(f"could not start a container: {_last_line(self._errors.read())}")
            time.sleep(_PAUSE)

    def run(self, command: str) -> str:
        """Run a shell command in the container, from its working directory.

        Args:
            command: command for bash.
        """
        try:
            output, status = _limited(
                [self.program, *self._exec_words(("bash", "-c", command), user=self._task.user)], self.command_timeout
            )
        except TimeoutError:
            return f"Error: the command ran for more than {self.command_timeout:g} s."
        return output if status == 0 else f"{output}Error: exit code {status}."

    def get_reward(self) -> float:
        """Run the tests and return the reward that they write."""
        # The model may have written such files.
        self._checked(f"rm -rf {_TESTS} {_LOGS} && mkdir -p {_LOGS} && chmod 777 {_LOGS}")
        copied = self._call("cp", f"{self._task.tests}/.", f"{self._name}:{_TESTS}")
        if copied.returncode != 0:
            raise BadResult(f"could not copy the tests: {_last_line(copied.stdout)}")
        self._checked(f"chmod +x {_TESTS}/test.sh")
        tests = f"{_TESTS}/test.sh > {_LOGS}/test-stdout.txt 2>&1"
        # Failed tests may end with any exit code.
        self._exec(("bash", "-c", tests), user=self._task.verifier_user, variables=self._task.verifier_variables)
        for name in ("reward.json", "reward.txt"):
            read = self._exec(("cat", f"{_LOGS}/{name}"), user="root")
            if read.returncode == 0:
                return reward_of(read.stdout, name)
        raise BadResult(f"has a task whose tests wrote no reward: {self._task.folder}")

    def close(self) -> None:
        """Remove the container."""
        if hasattr(self, "_container"):
            self._call("rm", "--force", self._name)
            self._container.communicate()
            self._errors.close()

    def _built(self, task: HarborTask) -> str:
        """Return the image of a task, and build it unless it exists."""
        digest = _digest(task.environment)
        tag = f"rlhf-harbor:{digest}"
        # Other episodes of the task wait here.
        with (Path(tempfile.gettempdir()) / f"rlhf-harbor-{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._call("image", "inspect", tag).returncode != 0:
                built = self._call("build", "--tag", tag, str(task.environment))
                if built.returncode != 0:
                    raise BadResult(f"could not build the image of {task.folder}: {_last_line(built.stdout)}")
        return tag

    def _exec(
        self,
        command: tuple[str, ...],
        *,
        user: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        return self._call(*self._exec_words(command, user=user, variables=variables), variables=variables)

    def _exec_words(
        self, command: tuple[str, ...], *, user: str, variables: Mapping[str, str] | None = None
    ) -> tuple[str, ...]:
        options = (*(("--user", user) if user else ()), *_names(variables or {}))
        return ("exec", *options, self._name, *command)

    def _checked(self, command: str) -> None:
        done = self._exec(("sh", "-c", command), user="root")
        if done.returncode != 0:
            raise BadResult(f"could not prepare the tests: {_last_line(done.stdout)}")

    def _call(self, *words: str, variables: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | (variables or {}),
        )


def _limited(command: list[str], timeout: float) -> tuple[str, int]:
    """Run a command. Returns the beginning of its output, and its exit status.

    The rest of the output is counted and dropped as it arrives: a command may write gigabytes.

    Raises:
        TimeoutError: it takes more than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    kept, dropped = "", 0
    with (
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
        selectors.DefaultSelector() as waiting,
    ):
        assert process.stdout is not None
        waiting.register(process.stdout, selectors.EVENT_READ)
        chunk = b" "
        while chunk:
            if not waiting.select(max(0.0, deadline - time.monotonic())):
                process.kill()
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), _CHUNK)
            text = decoder.decode(chunk, final=not chunk)
            room = _MAX_OUTPUT - len(kept)
            kept += text[:room]
            dropped += len(text[room:])
    return f"{kept}\n[{dropped:,} more characters]\n" if dropped else kept, process.returncode


def task_class(text: str) -> type:
    """Return the environment class of `docker?command_timeout=60`.

    Raises:
        BadResult: there is no such program or parameter, the program is not installed, or docker has no server.
            Completes "harbor:docker ...".
    """
    name, _, query = text.partition("?")
    if name not in _PROGRAMS:
        raise BadResult(f"is neither {' nor '.join(f'harbor:{one}' for one in _PROGRAMS)}, in which tasks run")
    if shutil.which(name) is None:
        raise BadResult(f"requires {name}, which is not installed")
    try:
        given = _DEFAULTS | parameters_of(f"harbor:{name}", query, _DEFAULTS)
    except UsageError as error:
        raise BadResult(f"is invalid: {error}") from error
    tried = subprocess.run([name, "version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if tried.returncode != 0:
        raise BadResult(f"cannot start containers: {_last_line(tried.stderr)}")
    return type("HarborTask", (_Task,), {**given, "program": name})


def reward_of(text: str, name: str) -> float:
    """Return the reward in a file of a task's tests: a number, or the entry `reward` or only entry of a JSON object.

    Raises:
        BadResult: there is no such number.
    """
    with contextlib.suppress(ValueError, TypeError):
        value = json.loads(text) if name.endswith(".json") else text
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value else next(iter(value.values())) if len(value) == 1 else None
        if value is not None and not isinstance(value, bool):
            return float(value)
    raise BadResult(f"has a task whose tests wrote no number as a reward into {name}: {text.strip()[:100]!r}")


def _names(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return options that pass variables on by name. Values may be keys, which the list of processes would show."""
    return tuple(word for name in variables for word in ("--env", name))


def _digest(folder: Path) -> str:
    """Hash the files of a folder with their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
