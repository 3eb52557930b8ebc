"""The command of an agent program, checked before anything starts."""

import re
import shlex
import shutil
from pathlib import Path

from rlhf_cli.errors import UsageError

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_ASSIGNMENT = re.compile(r"\w+=")
_OPTION = re.compile(r"([cmWX])")  # the first letter of a word of options that takes an argument
_WITHOUT_SCRIPT = "cm"  # which run something other than a file


def command_words(command: str) -> list[str]:
    """Return the words of a command.

    Raises:
        UsageError: there is no such program, or Python is to run a file that is not there.
    """
    words = shlex.split(command)
    if shutil.which(words[0]) is None:
        raise UsageError(f"--agent_command {command}: there is no program {words[0]!r}")
    script = _script(_without_variables(words))
    if script is not None and not Path(script).exists():
        raise UsageError(f"--agent_command {command}: there is no file {script!r}")
    return words


def _without_variables(words: list[str]) -> list[str]:
    """Return the command behind `env A=1 B=2`; all words of another one."""
    if Path(words[0]).name != "env":
        return words
    place = next((place for place, word in enumerate(words[1:], 1) if not _ASSIGNMENT.match(word)), len(words))
    return words[place:]


def _script(words: list[str]) -> str | None:
    """Return the file that Python runs, None if another program is called, whose arguments nobody knows here."""
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    left = iter(words[1:])
    for word in left:
        if not word.startswith("-"):
            return word
        if word == "-":
            return None  # the standard input
        if word.startswith("--"):
            return None  # of another Python, as PyPy's --jit, which takes an argument
        if (option := _OPTION.search(word)) is None:
            continue
        if option[1] in _WITHOUT_SCRIPT:
            return None
        if option.end() == len(word):  # else the argument is in the same word
            next(left, None)
    return None
