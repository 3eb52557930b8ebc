"""The part of this machine that a program in the sandbox sees: the interpreter, its standard library, shared libraries.

Computed once in the process that asks for programs to be run; sandbox_launcher makes it. Left out are installed
packages: they are the user's, and hundreds of megabytes of them would be open to any program.
"""

import functools
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Where the loader looks for shared libraries.
_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_PACKAGE_FOLDERS = ("python*/site-packages", "python*/dist-packages", "site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class RootPlan:
    """Contents of the sandbox's root besides its scratch folders. Paths are the same inside and outside.

    `folders` are shown read-only, `hidden` folders in them appear empty; `links` are symbolic links and their targets.
    """

    python: str
    folders: tuple[str, ...]
    hidden: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


@functools.cache
def root_plan() -> RootPlan:
    """Return the root for the interpreter of this process, without the virtual environment it may run in."""
    present = [folder for folder in _LIBRARY_FOLDERS if os.path.isdir(folder)]
    links = tuple((folder, os.readlink(folder)) for folder in present if os.path.islink(folder))
    folders: list[str] = []
    wanted = [folder for folder in present if not os.path.islink(folder)]
    for folder in [*wanted, *_python_folders()]:
        if os.path.isdir(folder) and not any(Path(folder).is_relative_to(other) for other in folders):
            folders.append(folder)
    hidden = {str(path) for folder in [*folders, *_python_folders()] for path in _package_folders(folder)}
    return RootPlan(base_python(), tuple(folders), tuple(sorted(hidden)), links)


def base_python() -> str:
    """Return the interpreter that a virtual environment's one leads to."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _python_folders() -> list[str]:
    """Return the interpreter's library folders, under the name it was built or started with and under their real
    one.
    """
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix}
    base |= {"installed_platbase": sys.base_exec_prefix}
    standard = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    folders = [os.path.join(sys.base_prefix, "lib"), os.path.join(os.path.dirname(base_python()), "..", "lib")]
    named = [os.path.normpath(folder) for folder in [*folders, *standard]]
    return list(dict.fromkeys([*named, *map(os.path.realpath, named)]))


def _package_folders(folder: str) -> list[Path]:
    return [path for pattern in _PACKAGE_FOLDERS for path in Path(folder).glob(pattern) if path.is_dir()]
