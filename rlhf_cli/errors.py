"""Errors that the terminal shows as one sentence, and helpers for error messages.

Out-of-memory errors from all libraries are converted. Any other exception is unexpected: the terminal shows its type
and the path to the full traceback.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal


def listed(names: Iterable[str], last: str = "and") -> str:
    """Join names into a phrase: "a, b and c". `last` is the conjunction."""
    *others, final = names
    return f"{', '.join(others)} {last} {final}" if others else final


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint to the most similar known name, or "" if none is similar."""
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


class UsageError(ValueError):
    """Invalid setting, file or row. The message names the problem, the place and the fix. Exit status 2."""


MemoryKind = Literal["GPU memory", "host memory", "space in /dev/shm"]


@dataclass(frozen=True)
class Shortage:
    """Full memory, as part of an error message.

    - `where`: the phase, such as "while training on a pack of 8192 tokens".
    - `fix`: flags to set, by default a hint for the kind. `from_plan`: whether they come from the plan of the run.
    - `doubt`: what was seen instead, if full memory is only the probable cause.
    - `role`: the role that failed, "engine" for a rollout engine, "" if unknown.
    - `detail`: the library's message. `tokens`: tokens of the pack that failed, 0 if none did.
    """

    kind: MemoryKind
    where: str = ""
    fix: str | None = None
    role: str = ""
    detail: str = ""
    tokens: int = 0
    from_plan: bool = False
    doubt: str = ""

    def __str__(self) -> str:
        doubt = f"{self.doubt}, probably " if self.doubt else ""
        return f"{doubt}out of {self.kind}{self.where and ' '}{self.where}: {self.fix or _FIXES[self.kind]}"


class RunError(RuntimeError):
    """A run failed after it started. The message names the reason and how to continue. Exit status 1.

    The message is the concatenation of the arguments. One of them may be a `Shortage`, whose fix is filled in where the
    plan of the run is known.
    """

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    @property
    def shortage(self) -> Shortage | None:
        """The full memory that caused the error, if any."""
        return next((part for part in self.args if isinstance(part, Shortage)), None)

    def explain(self, where: str, fix: str | None) -> None:
        """Replace place and fix of the shortage by those from the plan."""
        values = {"where": where, "from_plan": True} | ({"fix": fix} if fix else {})
        self.args = tuple(replace(part, **values) if isinstance(part, Shortage) else part for part in self.args)  # type: ignore[arg-type]


class ProcessDied(RunError):
    """A process died. The failure may be temporary, so the run can resume from the last checkpoint."""

    def __str__(self) -> str:
        hint = "run the same command with --load_checkpoint to continue from the last checkpoint"
        return f"{super().__str__()}; {hint}"

    @property
    def message(self) -> str:
        """The message without the hint to resume."""
        return super().__str__()


class OutOfMemory(RunError):
    """Out of GPU memory, host memory or /dev/shm. One part of the message is a `Shortage`."""


_SHORTAGES: dict[MemoryKind, str] = {
    "GPU memory": r"(CUDA|HIP) ([Ee]rror: )?out of memory|Cuda failure.*out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|memory for the cache blocks|larger than the available KV cache|less than desired GPU memory utilization"
    r"|not enough GPU memory",
    "space in /dev/shm": r"/dev/shm.*No space left|No space left.*/dev/shm|Bus error|SIGBUS|shared memory \(shm\)"
    r"|creating shared memory segment",
    "host memory": r"can't allocate memory|Cannot allocate memory|running low on memory|std::bad_alloc"
    r"|less than desired CPU memory utilization|less than requested memory for kv"
    # oneDNN's, which computes in bf16 on a CPU. What it cannot compute, it calls a primitive descriptor.
    r"|could not create a (primitive|memory object)(?! descriptor)"
    # std::thread's error, as in Gloo. Python's errors of non-blocking files have a number before these words.
    r"|^Resource temporarily unavailable|can't start new thread",
}
"""Patterns in out-of-memory messages from libraries, by memory kind. A full /dev/shm kills with SIGBUS."""

_FIXES: dict[MemoryKind, str] = {
    "GPU memory": "lower --train_max_tokens_per_gpu or --vllm_gpu_memory_utilization; docs/howto/debugging.md has more",
    "space in /dev/shm": "remove leftover files from earlier runs, or start the container with a larger --shm-size",
    "host memory": "stop other programs, or use fewer processes or a smaller model; docs/howto/debugging.md has more",
}


def full_memory(error: BaseException | str) -> MemoryKind | None:
    """Classify a library's error or message: the kind of memory that is full, or None for other errors."""
    if isinstance(error, BaseException):
        # By class name: importing torch and Ray here would slow down every command.
        names = {cls.__name__ for cls in type(error).__mro__}
        # ray.exceptions.OutOfMemoryError is about host memory, torch's about GPU memory.
        if "OutOfMemoryError" in names:
            return "host memory" if "RayError" in names else "GPU memory"
        if "MemoryError" in names:
            return "host memory"
    text = str(error)
    return next((kind for kind, pattern in _SHORTAGES.items() if re.search(pattern, text)), None)


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the exception type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


LONGEST_REASON = 500
"""Maximum characters quoted from a library's message."""


def one_line(error: BaseException) -> str:
    """Return a library's message in one line, truncated at `LONGEST_REASON`, or the exception type without a message.

    For libraries that start with a heading ("... from one of:") and explain in the following lines.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


def missing_package(error: ModuleNotFoundError) -> str:
    """Format a message about a missing required package."""
    name = (error.name or str(error)).partition(".")[0]
    return f"package {name} is not installed: reinstall rlhf-cli, or pip install {name}; `rlhf doctor` checks the rest"
