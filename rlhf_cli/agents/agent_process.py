"""One process of an agent program: started with its row, watched, and killed with its children."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlhf_cli.errors import LONGEST_REASON
from rlhf_cli.rewards.workers.child import describe_end

_PACKAGE_ROOT = Path(__file__).parents[2]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from rlhf_cli.agents.agent_start import main; del sys.path[0]; "
_START += "main(int(sys.argv[2]), sys.argv[3:])"

_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "TERM", "TMPDIR", "USER")
"""Variables of the run that a program gets: no keys are among them."""
_TAIL_BYTES = 1 << 16  # of a stream, in which its last line is looked for
_TRACE_LINES = 12


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended: with a reward, None if it printed none, or with a failure.

    `failure` completes a sentence about the program; `trace` is the end of its error stream then.
    """

    reward: float | None = None
    failure: str | None = None
    trace: str = ""


class AgentProcess:
    """A running program. Its streams are files, so that nobody has to read them while it runs."""

    def __init__(
        self, words: list[str], row: Mapping[str, object], variables: Mapping[str, str], lifeline: int
    ) -> None:
        """Start it; `lifeline` is the reading end of a pipe whose writing end this process alone holds."""
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with tempfile.TemporaryFile() as given:
                given.write(json.dumps(row, default=str).encode() + b"\n")
                given.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _START, str(_PACKAGE_ROOT), str(lifeline), *words],
                    stdin=given,
                    stdout=self._output,
                    stderr=self._errors,
                    env={**inherited, **variables},
                    pass_fds=(lifeline,),
                    start_new_session=True,  # a process group of its own, so that its children are killed with it
                )
        except BaseException:
            self._close()
            raise

    def wait(self) -> None:
        """Wait until the process has ended. It is not reaped, so its number stays taken."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """End the process and its children at once; no harm if they have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> ProgramEnd:
        """Kill what is left of the process group and return how the program ended by itself; to be called after
        `wait`.
        """
        end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        self._process.wait()
        try:
            if end is None or (end.si_code, end.si_status) == (os.CLD_EXITED, 0):
                return reward_of(_last_lines(_tail(self._output), 1))
            lines = _last_lines(_tail(self._errors), _TRACE_LINES)
            last = f"; its last line: {lines[-1].strip()[:LONGEST_REASON]}" if lines else ""
            return ProgramEnd(failure=f"{describe_end(end.si_code, end.si_status)}{last}", trace="\n".join(lines))
        finally:
            self._close()

    def _close(self) -> None:
        self._output.close()
        self._errors.close()


def reward_of(lines: list[str]) -> ProgramEnd:
    """Return the reward in the last line of a program's output: a JSON object with the number `reward`."""
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "reward" not in found:
        return ProgramEnd()
    given = found["reward"]
    try:
        reward = float(given) if isinstance(given, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        reward = math.inf
    if not math.isfinite(reward):
        return ProgramEnd(failure=f"printed a reward that is no number: {json.dumps(given)[:LONGEST_REASON]}")
    return ProgramEnd(reward)


def _tail(stream: IO[bytes]) -> str:
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return stream.read().decode(errors="replace")


def _last_lines(text: str, count: int) -> list[str]:
    """Return the last lines that are not blank. Other ends of lines than these may stand in a JSON text."""
    return [line for line in re.split(r"[\r\n]", text) if line.strip()][-count:]
