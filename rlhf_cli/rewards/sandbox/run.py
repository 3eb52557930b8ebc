"""Runs untrusted Python programs in the sandbox, and checks whether the sandbox works on this machine.

A launcher process per program (launcher.py) creates the sandbox. It is a new interpreter, never a fork. docs/sandbox.md
lists the protections.
"""

import functools
import io
import marshal
import os
import platform
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.sandbox.filter import seccomp_filter
from rlhf_cli.rewards.sandbox.root import base_python, root_plan

# From this kernel on, RLIMIT_NPROC counts processes per user namespace, not per host user. mount_setattr exists since
# 5.12.
_MIN_KERNEL = (5, 14)

# Seconds after the program's time limit until the launcher is considered broken.
_GRACE = 20.0

_CHUNK = 1 << 16
_PACKAGE_ROOT = Path(__file__).parents[3]
_START = """
import sys
root, *numbers = sys.argv[1:]
sys.path.insert(0, root)
from rlhf_cli.rewards.sandbox import launcher
del sys.path[0]
launcher.main(*map(int, numbers))
"""

_SIGXCPU = 24

_Ended = Literal["finished", "raised", "time", "memory", "output", "killed"]


class SandboxError(RuntimeError):
    """The sandbox could not be created, or it broke. Nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits. A program is one process: it may start threads, but no processes."""

    seconds: float = 5.0
    """Wall-clock time. The CPU time limit over all threads is 2 to 3 s higher."""
    memory_bytes: int = 512 << 20
    """Address space."""
    output_bytes: int = 1 << 20
    """Limit for stdout and stderr, each."""
    scratch_bytes: int = 16 << 20
    """Total size of written files, which are in memory."""
    max_processes: int = 64
    """Threads, including a few sandbox processes."""
    max_files: int = 64
    """Open files."""


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """How a program ended.

    - `ended`: "finished" with exit code 0, "raised" with another exit code, "killed" by a signal, or "time", "memory"
      or "output" if it exceeded that limit.
    - `exit_code`, `signal`: None if not applicable.
    - `stdout`, `stderr`: truncated at the limit; invalid UTF-8 is replaced.
    - `seconds`: wall-clock time.
    """

    ended: _Ended
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    seconds: float


def run_program(
    program: str, stdin: str = "", *, limits: Limits | None = None, sandboxed: bool = True
) -> ProgramOutcome:
    """Run Python source as a program and return the outcome. No process or file is left behind.

    Without `sandboxed`, the program runs as this user, and only resource limits and the process group kill apply.

    Raises:
        SandboxError: the sandbox could not be created.
    """
    limits = limits or Limits()
    if sandboxed:
        return Launch(sandboxed_request(program, stdin, limits), limits).outcome()
    with tempfile.TemporaryDirectory(prefix="rlhf_program_") as folder:
        request = _request(program, stdin, limits) | {"sandboxed": False, "python": base_python(), "folder": folder}
        return Launch(request, limits).outcome()


def sandboxed_request(program: str, stdin: str, limits: Limits) -> dict[str, object]:
    """Build the launcher's request for a sandboxed program."""
    return _request(program, stdin, limits) | {"sandboxed": True, "filter": _filter()} | asdict(root_plan())


def _request(program: str, stdin: str, limits: Limits) -> dict[str, object]:
    return {"program": _encodable(program), "stdin": _encodable(stdin)} | asdict(limits)


def require_sandbox(*, sandboxed: bool = True) -> None:
    """Check that programs can run here, with a probe program that tests the protections.

    Raises UsageError with the reason and a fix.
    """
    problem = _problem() if sandboxed else _unsandboxed_problem()
    if problem is None:
        return
    fix = "; --code_unsandboxed runs code as this user, with access to all of the user's files" if sandboxed else ""
    raise UsageError(f"code cannot run on this machine: {problem}{fix}")


def _problem() -> str | None:
    if sys.platform != "linux":
        return f"the sandbox requires Linux, this is {platform.system()}"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the sandbox supports x86_64 and aarch64, this is {platform.machine()}"
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < _MIN_KERNEL:
        return f"the sandbox requires Linux {'.'.join(map(str, _MIN_KERNEL))} or newer, this is {release}"
    try:
        # 20 s: a loaded machine may take far longer than the default to start an interpreter.
        seen = run_program(_PROBE, limits=Limits(seconds=20.0, max_processes=_PROBE_PROCESSES))
    except SandboxError as error:
        return f"{error}; the sandbox requires unprivileged user namespaces"
    if seen.ended != "finished":
        last = (seen.stderr.strip().splitlines() or ["no message"])[-1]
        return f"a test program in the sandbox failed ({seen.ended}: {last})"
    return None


def _unsandboxed_problem() -> str | None:
    if os.name != "posix":
        return f"resource limits require a POSIX system, this is {platform.system()}"
    try:
        seen = run_program("", limits=Limits(seconds=20.0), sandboxed=False)
    except SandboxError as error:
        return str(error)
    return None if seen.ended == "finished" else f"a test program failed: {seen.stderr[-300:]}"


_PROBE_PROCESSES = 16

# Tests that the protections are in effect. A failed assertion becomes the error message.
_PROBE = f"""
import os, socket, threading
assert os.getuid() != 0 and os.getpid() == 2, "it is not in separate namespaces"
assert not os.path.exists("/etc/passwd"), "it can read this machine's files"
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
assert refused(socket.socket), "it can use the network"
assert refused(os.fork), "it can start processes"
end = threading.Event()
started = 0
try:
    for started in range({_PROBE_PROCESSES}):
        threading.Thread(target=end.wait).start()
except RuntimeError:
    pass
else:
    raise AssertionError("its threads are not limited")
finally:
    end.set()
"""


@functools.cache
def _filter() -> bytes:
    return seccomp_filter(platform.machine())


def _encodable(text: str) -> str:
    """Replace lone surrogates, which a model may write and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


class Launch:
    """One launcher process, from start to exit."""

    def __init__(self, request: dict[str, object], limits: Limits) -> None:
        self._request, self._limits = request, limits
        self._stdout, self._stderr, self._status = bytearray(), bytearray(), bytearray()
        self._is_over_output = False

    def outcome(self) -> ProgramOutcome:
        """Run the program and return the outcome. Raises SandboxError."""
        # A file instead of a pipe for the request, which may exceed a pipe's buffer.
        with tempfile.TemporaryFile() as file:
            marshal.dump(self._request, file)
            file.seek(0)
            with _pipe() as (control, hold), _pipe() as (status, report):
                self._follow(file, control, hold, status, report)
        lines = self._reports()
        if "error" in lines or "seconds" not in lines:
            reason = (
                lines.get("error") or self._stderr.decode(errors="replace").strip()[-300:] or "its launcher was killed"
            )
            raise SandboxError(f"the sandbox could not be created ({reason})")
        return self._outcome(lines)

    def _reports(self) -> dict[str, object]:
        """Merge the status messages from launcher and init."""
        reports: dict[str, object] = {}
        stream = io.BytesIO(self._status)
        while stream.tell() < len(self._status):
            reports |= marshal.load(stream)
        return reports

    def _follow(self, file: Any, control: "_End", hold: "_End", status: "_End", report: "_End") -> None:
        """Start the launcher and collect all output until launcher and program have exited."""
        # -I and -S skip site-packages and user settings, which saves start-up time.
        process = subprocess.Popen(
            [base_python(), "-I", "-S", "-c", _START, str(_PACKAGE_ROOT), str(control.number), str(report.number)],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(control.number, report.number),
            cwd="/",
            env={key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"},
        )
        with process:
            try:
                # Close this process's copies: the status pipe then ends when launcher and init have exited.
                control.close()
                report.close()
                assert process.stdout is not None
                assert process.stderr is not None
                into = {process.stdout.fileno(): self._stdout, process.stderr.fileno(): self._stderr}
                self._read({**into, status.number: self._status}, status.number, hold)
            finally:
                process.kill()

    def _read(self, into: dict[int, bytearray], status: int, hold: "_End") -> None:
        """Collect output until the status pipe is closed, then read what is left."""
        deadline = time.monotonic() + self._limits.seconds + _GRACE
        with selectors.DefaultSelector() as selector:
            for number in into:
                os.set_blocking(number, False)
                selector.register(number, selectors.EVENT_READ)
            is_open = True
            while is_open:
                left = deadline - time.monotonic()
                if left < 0:
                    raise SandboxError(f"the sandbox did not kill the program within {_GRACE:g} s after the time limit")
                for key, _ in selector.select(left):
                    if not self._take(key.fd, into[key.fd]):
                        selector.unregister(key.fd)
                        is_open = is_open and key.fd != status
                # Closing the control pipe makes the launcher kill the program.
                if self._is_over_output:
                    hold.close()
        # Not until end of file: without the sandbox, a surviving process may hold stdout open.
        for number, collected in into.items():
            while self._take(number, collected):
                pass

    def _take(self, number: int, collected: bytearray) -> bool:
        """Read once. Returns False at end of file, or if no data is available."""
        try:
            data = os.read(number, _CHUNK)
        except BlockingIOError:
            return False
        # Keep reading past the limit without storing, so that the program does not block on a full pipe.
        room = len(data) if collected is self._status else max(0, self._limits.output_bytes - len(collected))
        collected += data[:room]
        self._is_over_output |= len(data) > room
        return bool(data)

    def _outcome(self, lines: dict[str, Any]) -> ProgramOutcome:
        code = os.waitstatus_to_exitcode(lines["status"]) if "status" in lines else None
        stdout, stderr = (text.decode(errors="replace") for text in (self._stdout, self._stderr))
        return ProgramOutcome(
            ended=self._why(code, stderr, is_out_of_time=lines.get("ended") == "time"),
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            stdout=stdout,
            stderr=stderr,
            seconds=lines["seconds"],
        )

    def _why(self, code: int | None, stderr: str, *, is_out_of_time: bool) -> _Ended:
        if self._is_over_output:
            return "output"
        if is_out_of_time or code == -_SIGXCPU:
            return "time"
        if code is None or code < 0:
            return "killed"
        if code == 0:
            return "finished"
        # The address space limit shows up as a MemoryError, not as a signal.
        last = stderr.rstrip().rpartition("\n")[2]
        return "memory" if last.startswith("MemoryError") else "raised"


class _End:
    """One end of a pipe, which may be closed more than once."""

    def __init__(self, number: int) -> None:
        self.number, self._is_open = number, True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.number)


@contextmanager
def _pipe() -> Iterator[tuple[_End, _End]]:
    """Open a pipe and yield the read and write ends."""
    ends = tuple(map(_End, os.pipe()))
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()
