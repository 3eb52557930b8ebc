"""Imports a user's Python file as a module. Used only in separate processes, never in the trainer."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rlhf_cli.rewards.records import BadResult


def file_and_name(place: str) -> tuple[Path, str | None]:
    """Split FILE.py or FILE.py:NAME into the file and the name."""
    # A file name may contain a colon.
    whole = Path(place).expanduser().resolve()
    file, _, name = place.rpartition(":")
    if whole.is_file() or not file or not name.isidentifier():
        return whole, None
    return Path(file).expanduser().resolve(), name


def import_file(path: Path, name: str) -> ModuleType:
    """Import a file under the given module name. Like a script, it can import files from the same folder.

    Raises:
        BadResult: the file is not valid Python. The message completes the sentence "reward.py ...".
    """
    sys.path.insert(0, str(path.parent))
    # Not spec_from_file_location, which accepts only known extensions such as .py.
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Before execution: dataclasses and pickle look up the defining module in sys.modules.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        # The error is in a module that the file imports: the traceback names it.
        if error.filename != str(path):
            raise
        raise BadResult(f"is not valid Python: line {error.lineno}: {error.msg}") from error
    return module
