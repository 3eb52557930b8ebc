"""Environments from the verifiers package, played by worker processes in a separate interpreter.

A worker (verifiers_worker.py) loads the environment once and plays one episode at a time. It calls the policy through
the endpoint, like an agent, and returns the reward from the environment's rubric.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from socket import SHUT_RDWR, SHUT_WR, socketpair

import psutil

from rlhf_cli.agents.agent_process import ProgramEnd, ProgramFailed, kill_group, reap, reward_end, start_program
from rlhf_cli.agents.agent_programs import Programs
from rlhf_cli.agents.chat_responses import MODEL
from rlhf_cli.agents.endpoint import new_key
from rlhf_cli.data.reading.verifiers import check_environment, worker_command
from rlhf_cli.errors import LONGEST_REASON
from rlhf_cli.rewards.workers.process import LOAD_LIMIT

_RECEIVE_SIZE = 1 << 16
# For a worker without an episode to stop its tool servers.
_END_SECONDS = 10.0


class VerifiersPrograms(Programs):
    """Plays episodes of `verifiers:NAME` in at most `num_workers` processes. See `Programs`."""

    def __init__(self, name: str, *, timeout: float, num_workers: int) -> None:
        """Load the environment once. Raises UsageError if that fails."""
        super().__init__(timeout=timeout, num_workers=num_workers)
        check_environment(name)
        self._name, self._command = name, worker_command(name, "play")
        self._idle: list[_Worker] = []

    def __enter__(self) -> "VerifiersPrograms":
        super().__enter__()
        # Starting takes seconds of a core.
        self._starting = asyncio.Semaphore(os.cpu_count() or 1)
        return self

    async def _end_all(self) -> None:
        await super()._end_all()
        for worker in self._idle:
            worker.finish()
        deadline = time.monotonic() + _END_SECONDS
        while self._idle:
            self._idle.pop().stop(deadline)

    @property
    def about(self) -> str:
        """A line for the startup log."""
        return self._name

    async def _begin(self, row: Mapping[str, object]) -> "_Worker":
        worker = self._idle.pop() if self._idle else await self._started()
        worker.begin(row)
        return worker

    async def _started(self) -> "_Worker":
        """Start a worker and wait until it has loaded the environment. Raises ProgramFailed."""
        async with self._starting:
            access = {"url": self._endpoint.url, "key": new_key(), "model": MODEL}
            worker = _Worker(self._command, access, self._lifeline, self._idle)
            ready = self._loop.run_in_executor(self._watchers, worker.wait)
            is_ready = False
            try:
                await asyncio.wait({ready}, timeout=LOAD_LIMIT)
                is_ready = worker.answer is not None
            # Also if the episode was dropped meanwhile.
            finally:
                if not is_ready:
                    is_late = not ready.done()
                    worker.kill()
                    await asyncio.shield(ready)
                    end = worker.close()
            if not is_ready:
                raise ProgramFailed(ProgramEnd(failure=f"did not load within {LOAD_LIMIT:g} s") if is_late else end)
            return worker


class _Worker:
    """A worker process, seen from the driver. It plays one episode at a time (see `Process`)."""

    def __init__(self, command: list[str], access: Mapping[str, str], lifeline: int, idle: "list[_Worker]") -> None:
        """Start the process, and tell it how to call the policy. `idle` gets workers without an episode."""
        self.key, self._idle = access["key"], idle
        self.answer: dict[str, object] | None = None
        self._is_killed = False
        # Environments print to both streams. Only the socket carries answers.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._socket, theirs = socketpair()
        with theirs:
            self._process = start_program(command, (theirs.fileno(), self._errors, self._errors), {}, lifeline)
        self._send(access)

    def begin(self, row: Mapping[str, object]) -> None:
        """Begin an episode of a row."""
        self.answer = None
        self._send(row)

    def wait(self) -> None:
        """Block until the process has answered, or has exited."""
        received = b""
        while not received.endswith(b"\n"):
            data = self._socket.recv(_RECEIVE_SIZE)
            if not data:
                return
            received += data
        self.answer = json.loads(received)

    def kill(self) -> None:
        """Kill the process and all tool servers, unless the answer has arrived."""
        if self.answer is None:
            self._is_killed = True
            # Tool servers run in separate process groups.
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
            kill_group(self._process)
            # A child may still hold the other end.
            self._socket.shutdown(SHUT_RDWR)

    def close(self) -> ProgramEnd:
        """Return the outcome. A worker that has answered is ready for another episode."""
        if self.answer is None or self._is_killed:
            return self._ended() or ProgramEnd(failure="ended without a reward")
        self._idle.append(self)
        failure, reward = self.answer.get("failure"), self.answer.get("reward")
        if failure is not None:
            return ProgramEnd(failure=f"failed: {' '.join(str(failure).split())[:LONGEST_REASON]}")
        return ProgramEnd() if reward is None else reward_end(reward)

    def finish(self) -> None:
        """Let a process without an episode stop its tool servers and exit."""
        self._socket.shutdown(SHUT_WR)

    def stop(self, deadline: float) -> None:
        """Wait until a process without an episode has exited, and kill it after the deadline, in monotonic seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.answer = None
        if self._process.returncode is None:
            self.kill()
            self._ended()
        self._close()

    def _ended(self) -> ProgramEnd | None:
        end = reap(self._process, self._errors)
        self._close()
        return end

    def _close(self) -> None:
        self._socket.close()
        self._errors.close()

    def _send(self, value: object) -> None:
        # A process that has exited is noticed by `wait`.
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(value, default=str).encode() + b"\n")
