"""A user's Python file as a module. Imported only in a process of its own, never into the trainer."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rlhf_cli.rewards.records import BadResult


def file_and_name(place: str) -> tuple[Path, str | None]:
    """Return (file, a name in it) of FILE.py or FILE.py:NAME."""
    whole = Path(place).expanduser().resolve()
    file, _, name = place.rpartition(":")
    if whole.is_file() or not file or not name.isidentifier():
        return whole, None
    return Path(file).expanduser().resolve(), name


def import_file(path: Path, name: str) -> ModuleType:
    """Return the file as a module of this name; it may import its neighbours, as if it were run.

    Raises:
        BadResult: the file is not valid Python; the message ends the sentence "reward.py ...".
    """
    sys.path.insert(0, str(path.parent))
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle in the file look their module up
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        if error.filename != str(path):
            raise
        raise BadResult(f"is not valid Python: line {error.lineno}: {error.msg}") from error
    return module
