"""Parsing and startup checks for `--agent_command`."""

import re
import shlex
import shutil
from pathlib import Path

from rlhf_cli.errors import UsageError

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_ASSIGNMENT = re.compile(r"\w+=")
# Python options that consume an argument: `-c CODE`, `-m MODULE`, `-W FILTER`, `-X OPTION`.
_OPTION = re.compile(r"([cmWX])")
# With these two, Python runs no script file.
_WITHOUT_SCRIPT = "cm"


def command_words(command: str) -> list[str]:
    """Split a command into arguments.

    Raises:
        UsageError: the executable, or the script that Python would run, does not exist.
    """
    words = shlex.split(command)
    if shutil.which(words[0]) is None:
        raise UsageError(f"--agent_command {command}: program {words[0]!r} not found")
    script = _script(_without_variables(words))
    if script is not None and not Path(script).exists():
        raise UsageError(f"--agent_command {command}: file {script!r} not found")
    return words


def _without_variables(words: list[str]) -> list[str]:
    """Strip `env A=1 B=2` from a command."""
    if Path(words[0]).name != "env":
        return words
    place = next((place for place, word in enumerate(words[1:], 1) if not _ASSIGNMENT.match(word)), len(words))
    return words[place:]


def _script(words: list[str]) -> str | None:
    """Return the script that Python runs, or None for other programs."""
    # The check must never reject a valid command, so any unclear case returns None.
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    left = iter(words[1:])
    for word in left:
        if not word.startswith("-"):
            return word
        # A lone dash: Python reads code from stdin.
        if word == "-":
            return None
        # Long options differ between interpreters: PyPy's --jit consumes an argument.
        if word.startswith("--"):
            return None
        if (option := _OPTION.search(word)) is None:
            continue
        if option[1] in _WITHOUT_SCRIPT:
            return None
        # `-W error` consumes the next argument, `-Werror` does not.
        if option.end() == len(word):
            next(left, None)
    return None
