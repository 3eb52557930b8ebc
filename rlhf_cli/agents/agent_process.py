"""Agent processes: started with a row on stdin, supervised, and killed together with their children."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from rlhf_cli.errors import LONGEST_REASON
from rlhf_cli.rewards.workers.child import describe_end

_PACKAGE_ROOT = Path(__file__).parents[2]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from rlhf_cli.agents.agent_start import main; del sys.path[0]; "
_START += "main(int(sys.argv[2]), sys.argv[3:])"

# An allowlist: API keys and tokens in the driver's environment must not reach the agent.
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "TERM", "TMPDIR", "USER")
# Read only the end of stdout and stderr: an agent may log gigabytes.
_TAIL_BYTES = 1 << 16
_TRACE_LINES = 12


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """Agent process outcome: a reward (None if it printed none) or a failure.

    `failure` completes a sentence about the agent program. `trace` holds the last stderr lines of a failed one.
    """

    reward: float | None = None
    failure: str | None = None
    trace: str = ""


class ProgramFailed(Exception):
    """There is no process for an episode."""

    def __init__(self, end: ProgramEnd) -> None:
        self.end = end


class Process(Protocol):
    """A process that plays an episode. `key` identifies it to the endpoint."""

    key: str

    def wait(self) -> None:
        """Block until the episode has ended. For another thread."""

    def kill(self) -> None:
        """Stop the episode. No-op after the answer."""

    def close(self) -> ProgramEnd:
        """Release the process and return the outcome. Call it after `wait`."""
        ...


class AgentProcess:
    """A running agent process."""

    def __init__(
        self, words: list[str], row: Mapping[str, object], variables: Mapping[str, str], lifeline: int
    ) -> None:
        """Start the process. `lifeline` is the read end of a pipe whose write end only the driver holds."""
        self.key = variables["OPENAI_API_KEY"]
        # Files instead of pipes: a full pipe would block the agent, since the output is read only after the exit.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with tempfile.TemporaryFile() as given:
                given.write(json.dumps(row, default=str).encode() + b"\n")
                given.seek(0)
                self._process = start_program(words, (given, self._output, self._errors), variables, lifeline)
        except BaseException:
            self._close()
            raise

    def wait(self) -> None:
        """Block until the process exits, without reaping it."""
        wait_unreaped(self._process)

    def kill(self) -> None:
        """Kill the process group. No-op if it has exited."""
        kill_group(self._process)

    def close(self) -> ProgramEnd:
        """Kill remaining children, release all resources and return the outcome. Call it after `wait`."""
        try:
            return reap(self._process, self._errors) or _reward_of(_last_lines(_tail(self._output), 1))
        finally:
            self._close()

    def _close(self) -> None:
        self._output.close()
        self._errors.close()


def start_program(
    words: Sequence[str],
    streams: tuple[IO[bytes] | int, IO[bytes], IO[bytes]],
    variables: Mapping[str, str],
    lifeline: int,
) -> "subprocess.Popen[bytes]":
    """Start a command in a process group that the kernel kills when the driver exits.

    Args:
        words: the command.
        streams: standard input, output and errors.
        variables: environment variables, in addition to a few of this process.
        lifeline: read end of a pipe whose write end only the driver holds.
    """
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    given, output, errors = streams
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START, str(_PACKAGE_ROOT), str(lifeline), *words],
        stdin=given,
        stdout=output,
        stderr=errors,
        env={**inherited, **variables},
        pass_fds=(lifeline,),
        # A separate process group, so that killing it also kills the agent's children.
        start_new_session=True,
    )


def wait_unreaped(process: "subprocess.Popen[bytes]") -> os.waitid_result | None:
    """Block until a process exits, and return its status."""
    # WNOWAIT keeps the zombie, so the pid cannot be reused before `reap` kills the process group.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all children. No-op after the exit."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def reap(process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> ProgramEnd | None:
    """Wait for a process, kill its children, and return the failure, or None for exit status 0."""
    # Read the exit status before the kill, which would hide it.
    end = wait_unreaped(process)
    kill_group(process)
    process.wait()
    if end is None or (end.si_code, end.si_status) == (os.CLD_EXITED, 0):
        return None
    lines = _last_lines(_tail(errors), _TRACE_LINES)
    last = f"; last stderr line: {lines[-1].strip()[:LONGEST_REASON]}" if lines else ""
    return ProgramEnd(failure=f"{describe_end(end.si_code, end.si_status)}{last}", trace="\n".join(lines))


def _reward_of(lines: list[str]) -> ProgramEnd:
    """Parse the reward from the last output line: a JSON object with a numeric `reward`."""
    try:
        parsed = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        parsed = None
    return reward_end(parsed["reward"]) if isinstance(parsed, dict) and "reward" in parsed else ProgramEnd()


def reward_end(given: object) -> ProgramEnd:
    """Return the outcome with a reward, or a failure if it is no finite number."""
    try:
        reward = float(given) if isinstance(given, int | float) else math.nan
    # float() overflows on integers with hundreds of digits.
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        return ProgramEnd(failure=f"printed an invalid reward: {json.dumps(given)[:LONGEST_REASON]}")
    return ProgramEnd(reward)


def _tail(stream: IO[bytes]) -> str:
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return stream.read().decode(errors="replace")


def _last_lines(text: str, count: int) -> list[str]:
    """Return the last non-blank lines."""
    # Not str.splitlines: it also splits at U+2028 and similar characters, which JSON strings may contain.
    return [line for line in re.split(r"[\r\n]", text) if line.strip()][-count:]
