"""The two kinds of failure that a person at the terminal reads in one sentence.

Memory that is full is one of them, whatever library reports it. Everything else is reported by its name, with the path
of its full trace.
"""

import re
from collections.abc import Iterable


def listed(names: Iterable[str], last: str = "and") -> str:
    """Return names as a phrase: "a, b and c". `last` is the word before the last name."""
    *others, final = names
    return f"{', '.join(others)} {last} {final}" if others else final


class UsageError(ValueError):
    """A setting, a file or a row is wrong. The message names what, where and what would be right; exit status 2."""


class RunError(RuntimeError):
    """A run that started well cannot go on. The message has the reason and the way to continue; exit status 1."""


class ProcessDied(RunError):
    """A process of the run died, which need not happen again: the run may go on from its last checkpoint."""

    def __str__(self) -> str:
        hint = "run the same command with --load_checkpoint to continue from the last checkpoint"
        return f"{super().__str__()}; {hint}"

    @property
    def message(self) -> str:
        """The message without the advice to continue."""
        return super().__str__()


class OutOfMemory(RunError):
    """Memory is full: of a GPU, of the machine, or of /dev/shm. The message names the flag to change."""


_SHORTAGES = {
    "GPU memory": r"(CUDA|HIP) (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED|memory for the cache blocks"
    r"|larger than the available KV cache|less than desired GPU memory utilization",
    "space in /dev/shm": r"/dev/shm.*No space left|No space left.*/dev/shm|Bus error|SIGBUS|shared memory \(shm\)",
    "host memory": r"can't allocate memory|Cannot allocate memory|running low on memory|std::bad_alloc",
}
"""Patterns of the libraries' messages about full memory, by the kind of memory."""

_FIXES = {
    "GPU memory": "lower --train_max_tokens_per_gpu or --vllm_gpu_memory_utilization; docs/howto/debugging.md has more",
    "space in /dev/shm": "remove files that earlier runs left there, or start the container with a larger --shm-size",
    "host memory": "end other programs, or use fewer processes or a smaller model; docs/howto/debugging.md has more",
}


def full_memory(error: BaseException | str) -> str | None:
    """Return the kind of memory that is full according to a library's error or its text; None for other errors."""
    if isinstance(error, BaseException):
        names = {cls.__name__ for cls in type(error).__mro__}
        if "OutOfMemoryError" in names:
            return "host memory" if "RayError" in names else "GPU memory"
        if "MemoryError" in names:
            return "host memory"
    text = str(error)
    return next((kind for kind, pattern in _SHORTAGES.items() if re.search(pattern, text)), None)


def memory_sentence(kind: str, where: str, fix: str | None = None) -> str:
    """Return the sentence about a kind of memory that is full: the place, and the way out."""
    return f"out of {kind}{where and ' '}{where}: {fix or _FIXES[kind]}"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error for a sentence of ours, or the kind of the error if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


LONGEST_REASON = 500
"""Characters of a library's message that a sentence of ours quotes."""


def one_line(error: BaseException) -> str:
    """Return a library's whole message in one line, cut at `LONGEST_REASON`; the error's type if it has no message.

    For libraries that begin with a heading ("... from one of:") and give the reason in the lines below it.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


def missing_package(error: ModuleNotFoundError) -> str:
    """Return the sentence about a package that this program needs and that is not installed."""
    name = (error.name or str(error)).partition(".")[0]
    return f"the package {name} is missing: reinstall rlhf-cli, or pip install {name}; `rlhf doctor` checks all others"
