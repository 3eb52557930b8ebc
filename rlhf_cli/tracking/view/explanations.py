"""Explanations of samples by `rlhf why`, in the background."""

import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_COMMAND = (sys.executable, "-m", "rlhf_cli", "why")
_END_SECONDS = 20.0
"""Time limit for a run to end after a signal."""


@dataclass
class _Job:
    """An explanation that was requested. `started` is None while it waits for an earlier one."""

    task: "asyncio.Task[dict[str, Any]] | None" = None
    started: float | None = None
    since: float = field(default_factory=time.monotonic)


class Explanations:
    """Runs `rlhf why` for one sample after the other: models of two would often not fit in memory."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[Path, str], _Job] = {}
        self._turn = asyncio.Lock()

    def start(self, run: Path, sample: str) -> None:
        """Start the explanation of a sample, unless it exists or is in progress."""
        job = self._jobs.get((run, sample))
        if job is None or (job.task is not None and job.task.done() and "error" in job.task.result()):
            job = self._jobs[run, sample] = _Job()
            job.task = asyncio.create_task(self._explained(job, run, sample))

    def state(self, run: Path, sample: str) -> dict[str, Any]:
        """Return `state`: none, waiting, running, or done with the explanation (`runs/online/why.py`) or an `error`."""
        job = self._jobs.get((run, sample))
        if job is None or job.task is None:
            return {"state": "none"}
        if not job.task.done():
            name = "waiting" if job.started is None else "running"
            return {"state": name, "seconds": round(time.monotonic() - (job.started or job.since))}
        return {"state": "done", **job.task.result()}

    async def close(self) -> None:
        """Stop all work."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _explained(self, job: _Job, run: Path, sample: str) -> dict[str, Any]:
        async with self._turn:
            job.started = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="rlhf-view-") as folder:
                file = Path(folder) / "explanation.json"
                status, errors = await _ran([*_COMMAND, str(run), f"--sample={sample}", f"--json_file={file}"])
                try:
                    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                except (OSError, ValueError):
                    return {"error": errors[-1] if errors else f"rlhf why ended with status {status}"}
                return found


async def _ran(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Run a program. Returns exit status and stderr lines."""
    process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
    try:
        _, errors = await process.communicate()
    except asyncio.CancelledError:
        await _ended(process)
        raise
    return process.returncode, errors.decode(errors="replace").strip().splitlines()


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a process; it stops its own processes on SIGTERM."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    except TimeoutError:
        process.kill()
