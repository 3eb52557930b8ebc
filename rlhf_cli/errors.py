"""The two kinds of failure a person at the terminal is told about in one sentence.

Everything else is a defect of the program: it is reported with the path of its full trace.
"""


class UsageError(ValueError):
    """A setting, a file or a row is wrong. The message names what, where and what would be right; exit status 2."""


class RunError(RuntimeError):
    """A run that started well cannot go on. The message says why and how to continue; exit status 1."""
