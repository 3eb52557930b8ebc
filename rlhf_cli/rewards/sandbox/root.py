"""Root file system plan for the sandbox: interpreter, standard library and shared libraries.

Computed once in the calling process; launcher.py builds it. Installed packages are excluded: they may contain the
user's private code.
"""

import functools
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Search paths of the dynamic loader.
_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_PACKAGE_FOLDERS = ("python*/site-packages", "python*/dist-packages", "site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class _RootPlan:
    """Root contents besides the scratch folders. Paths are the same inside and outside.

    - `folders`: mounted read-only.
    - `hidden`: folders that appear empty.
    - `links`: symbolic links with targets.
    """

    python: str
    folders: tuple[str, ...]
    hidden: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


@functools.cache
def root_plan() -> _RootPlan:
    """Return the root for this process's interpreter, without the virtual environment."""
    present = [folder for folder in _LIBRARY_FOLDERS if os.path.isdir(folder)]
    links = tuple((folder, os.readlink(folder)) for folder in present if os.path.islink(folder))
    folders: list[str] = []
    wanted = [folder for folder in present if not os.path.islink(folder)]
    for folder in [*wanted, *_python_folders()]:
        if os.path.isdir(folder) and not any(Path(folder).is_relative_to(other) for other in folders):
            folders.append(folder)
    hidden = {str(path) for folder in [*folders, *_python_folders()] for path in _package_folders(folder)}
    return _RootPlan(base_python(), tuple(folders), tuple(sorted(hidden)), links)


def base_python() -> str:
    """Return the interpreter behind the virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _python_folders() -> list[str]:
    """Return the interpreter's library folders, as configured and with symbolic links resolved."""
    # Without the overrides, sysconfig returns paths in the virtual environment.
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix}
    base |= {"installed_platbase": sys.base_exec_prefix}
    standard = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    folders = [os.path.join(sys.base_prefix, "lib"), os.path.join(os.path.dirname(base_python()), "..", "lib")]
    named = [os.path.normpath(folder) for folder in [*folders, *standard]]
    return list(dict.fromkeys([*named, *map(os.path.realpath, named)]))


def _package_folders(folder: str) -> list[Path]:
    return [path for pattern in _PACKAGE_FOLDERS for path in Path(folder).glob(pattern) if path.is_dir()]
