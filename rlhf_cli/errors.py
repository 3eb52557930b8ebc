"""The two kinds of failure a person at the terminal is told about in one sentence.

Everything else is a defect of the program: it is reported with the path of its full trace.
"""


class UsageError(ValueError):
    """A setting, a file or a row is wrong. The message names what, where and what would be right; exit status 2."""


class RunError(RuntimeError):
    """A run that started well cannot go on. The message says why and how to continue; exit status 1."""


class ProcessDied(RunError):
    """A process of the run died, which need not happen again: the run may go on from its last checkpoint."""

    def __str__(self) -> str:
        hint = "run the same command with --load_checkpoint to continue from the last checkpoint"
        return f"{super().__str__()}; {hint}"

    @property
    def said(self) -> str:
        """What happened, without how to go on."""
        return super().__str__()


def first_line(error: BaseException) -> str:
    """The first line of what a library's error says, for a sentence of ours; its kind where it says nothing."""
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
