"""The two kinds of failure that a person at the terminal reads in one sentence.

Everything else is a defect of the program: it is reported with the path of its full trace.
"""


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
