"""Errors that the terminal shows as one sentence, and helpers for error messages.

Out-of-memory errors from all libraries are converted. Any other exception is unexpected: the terminal shows its type
and the path to the full traceback.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches


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


class RunError(RuntimeError):
    """A run failed after it started. The message names the reason and how to continue. Exit status 1."""


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
    """Out of GPU memory, host memory or /dev/shm. The message names the flag to change."""


_SHORTAGES = {
    "GPU memory": r"(CUDA|HIP) (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED|memory for the cache blocks"
    r"|larger than the available KV cache|less than desired GPU memory utilization",
    "space in /dev/shm": r"/dev/shm.*No space left|No space left.*/dev/shm|Bus error|SIGBUS|shared memory \(shm\)",
    "host memory": r"can't allocate memory|Cannot allocate memory|running low on memory|std::bad_alloc",
}
"""Patterns in out-of-memory messages from libraries, by memory kind. A full /dev/shm kills with SIGBUS."""

_FIXES = {
    "GPU memory": "lower --train_max_tokens_per_gpu or --vllm_gpu_memory_utilization; docs/howto/debugging.md has more",
    "space in /dev/shm": "remove leftover files from earlier runs, or start the container with a larger --shm-size",
    "host memory": "stop other programs, or use fewer processes or a smaller model; docs/howto/debugging.md has more",
}


def full_memory(error: BaseException | str) -> str | None:
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


def memory_sentence(kind: str, where: str, fix: str | None = None) -> str:
    """Format an out-of-memory message with place and fix."""
    return f"out of {kind}{where and ' '}{where}: {fix or _FIXES[kind]}"


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
