"""Running untrusted Python programs: requests, results, and a check of this machine.

Every program is run by a launcher process of its own (launcher.py), started by executing an interpreter, never by
forking this process. The guards are listed in docs/sandbox.md.
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

# Processes are counted by user namespace from this kernel on (before, by user of the machine), which makes the limit
# on them mean something; mount_setattr is there as well.
MIN_KERNEL = (5, 14)

# Seconds past a program's limit after which its launcher counts as broken.
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

Ended = Literal["finished", "raised", "time", "memory", "output", "killed"]


class SandboxError(RuntimeError):
    """The sandbox could not be made or broke: nothing is known about the program. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program. Its processes are threads of one process: it cannot start others."""

    seconds: float = 5.0
    """On the clock, from its start; of processor time, over all threads, 2 to 3 more."""
    memory_bytes: int = 512 << 20
    """Address space."""
    output_bytes: int = 1 << 20
    """Of standard output and of standard error, each."""
    scratch_bytes: int = 16 << 20
    """Of all files it writes, which lie in memory."""
    max_processes: int = 64
    """Threads, a few of the sandbox's own processes among them."""
    max_files: int = 64
    """Open at a time."""


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """How a program ended.

    `ended`: "finished" with exit code 0, "raised" with another one, by its limit of "time", "memory" or "output", or
    "killed" by `signal`. `exit_code` and `signal` are None if they do not apply; `seconds` are on the clock.
    Output that is no UTF-8 has replacement characters; past the limit it is cut.
    """

    ended: Ended
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    seconds: float


def run_program(
    program: str, stdin: str = "", *, limits: Limits | None = None, sandboxed: bool = True
) -> ProgramOutcome:
    """Run Python source as a program of its own and return how it ended; nothing of it is left when this returns.

    Without `sandboxed` it runs as this user on this machine, with limits and a killed process group alone.

    Raises:
        SandboxError: the sandbox could not be made.
    """
    limits = limits or Limits()
    if sandboxed:
        return Launch(sandboxed_request(program, stdin, limits), limits).outcome()
    with tempfile.TemporaryDirectory(prefix="rlhf_program_") as folder:
        request = _request(program, stdin, limits) | {"sandboxed": False, "python": base_python(), "folder": folder}
        return Launch(request, limits).outcome()


def sandboxed_request(program: str, stdin: str, limits: Limits) -> dict[str, object]:
    """Return the launcher's request."""
    return _request(program, stdin, limits) | {"sandboxed": True, "filter": _filter()} | asdict(root_plan())


def _request(program: str, stdin: str, limits: Limits) -> dict[str, object]:
    return {"program": _encodable(program), "stdin": _encodable(stdin)} | asdict(limits)


def require_sandbox(*, sandboxed: bool = True) -> None:
    """See that programs can be run here, by running one that looks around.

    Raises UsageError, with the reason and a remedy, if they cannot.
    """
    problem = _problem() if sandboxed else _unsandboxed_problem()
    if problem is None:
        return
    way_out = "; --code_unsandboxed runs them as this user, with all its files in their reach" if sandboxed else ""
    raise UsageError(f"code cannot be run here: {problem}{way_out}")


def _problem() -> str | None:
    if sys.platform != "linux":
        return f"the sandbox is made of what Linux has, and this is {platform.system()}"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the sandbox knows the system calls of x86_64 and aarch64, and this is {platform.machine()}"
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < MIN_KERNEL:
        return f"the sandbox needs Linux {'.'.join(map(str, MIN_KERNEL))} or newer, and this is {release}"
    try:
        seen = run_program(_PROBE, limits=Limits(seconds=20.0, max_processes=_PROBE_PROCESSES))
    except SandboxError as error:
        return f"{error}; the sandbox needs unprivileged user namespaces"
    if seen.ended != "finished":
        last = (seen.stderr.strip().splitlines() or ["no message"])[-1]
        return f"a first program in the sandbox ended otherwise than it should ({seen.ended}: {last})"
    return None


def _unsandboxed_problem() -> str | None:
    if os.name != "posix":
        return f"limits are set as POSIX systems do, and this is {platform.system()}"
    try:
        seen = run_program("", limits=Limits(seconds=20.0), sandboxed=False)
    except SandboxError as error:
        return str(error)
    return None if seen.ended == "finished" else f"a first program did not end as it should: {seen.stderr[-300:]}"


_PROBE_PROCESSES = 16

# Sees that what guards this machine is really there; the terminal reports an assertion that fails.
_PROBE = f"""
import os, socket, threading
assert os.getuid() != 0 and os.getpid() == 2, "it is not in namespaces of its own"
assert not os.path.exists("/etc/passwd"), "it sees the files of this machine"
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
assert refused(socket.socket), "it may use the network"
assert refused(os.fork), "it may start processes"
end = threading.Event()
started = 0
try:
    for started in range({_PROBE_PROCESSES}):
        threading.Thread(target=end.wait).start()
except RuntimeError:
    pass
else:
    raise AssertionError("the number of its threads is not limited")
finally:
    end.set()
"""


@functools.cache
def _filter() -> bytes:
    return seccomp_filter(platform.machine())


def _encodable(text: str) -> str:
    """Return the text as UTF-8 can hold it: a model may write half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


class Launch:
    """One launcher process from its start to its end."""

    def __init__(self, request: dict[str, object], limits: Limits) -> None:
        self._request, self._limits = request, limits
        self._stdout, self._stderr, self._status = bytearray(), bytearray(), bytearray()
        self._is_over_output = False

    def outcome(self) -> ProgramOutcome:
        """Return the program's result. Raises SandboxError."""
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
            raise SandboxError(f"the sandbox could not be made ({reason})")
        return self._told(lines)

    def _reports(self) -> dict[str, object]:
        """Return the messages of launcher and init, together."""
        reports: dict[str, object] = {}
        stream = io.BytesIO(self._status)
        while stream.tell() < len(self._status):
            reports |= marshal.load(stream)
        return reports

    def _follow(self, file: Any, control: "_End", hold: "_End", status: "_End", report: "_End") -> None:
        """Start the launcher and read all it and the program write until both are gone."""
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
                control.close()
                report.close()
                assert process.stdout is not None
                assert process.stderr is not None
                into = {process.stdout.fileno(): self._stdout, process.stderr.fileno(): self._stderr}
                self._read({**into, status.number: self._status}, status.number, hold)
            finally:
                process.kill()

    def _read(self, into: dict[int, bytearray], status: int, hold: "_End") -> None:
        """Collect output until the launcher has closed the status pipe, then the rest."""
        deadline = time.monotonic() + self._limits.seconds + _GRACE
        with selectors.DefaultSelector() as selector:
            for number in into:
                os.set_blocking(number, False)
                selector.register(number, selectors.EVENT_READ)
            is_open = True
            while is_open:
                left = deadline - time.monotonic()
                if left < 0:
                    raise SandboxError(f"the sandbox did not end the program within {_GRACE:g} s of its limit")
                for key, _ in selector.select(left):
                    if not self._take(key.fd, into[key.fd]):
                        selector.unregister(key.fd)
                        is_open = is_open and key.fd != status
                if self._is_over_output:
                    hold.close()
        for number, collected in into.items():
            while self._take(number, collected):
                pass

    def _take(self, number: int, collected: bytearray) -> bool:
        """Read once; return False at the end, or if there is nothing to read."""
        try:
            data = os.read(number, _CHUNK)
        except BlockingIOError:
            return False
        room = len(data) if collected is self._status else max(0, self._limits.output_bytes - len(collected))
        collected += data[:room]
        self._is_over_output |= len(data) > room
        return bool(data)

    def _told(self, lines: dict[str, Any]) -> ProgramOutcome:
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

    def _why(self, code: int | None, stderr: str, *, is_out_of_time: bool) -> Ended:
        if self._is_over_output:
            return "output"
        if is_out_of_time or code == -_SIGXCPU:
            return "time"
        if code is None or code < 0:
            return "killed"
        if code == 0:
            return "finished"
        last = stderr.rstrip().rpartition("\n")[2]
        return "memory" if last.startswith("MemoryError") else "raised"


class _End:
    """One end of a pipe, closed once."""

    def __init__(self, number: int) -> None:
        self.number, self._is_open = number, True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.number)


@contextmanager
def _pipe() -> Iterator[tuple[_End, _End]]:
    """Return the reading and the writing end of a pipe."""
    ends = tuple(map(_End, os.pipe()))
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()
