"""YAML files with settings (`--config`): read strictly, with file and line in every message.

`--config` may name several files, and `extends` in a file names others, which go before it; later files win.
"""

import math
import os
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml

from rlhf_cli.errors import UsageError
from rlhf_cli.flags import shown

LARGEST_VALUE = 1_000_000
"""Characters and items that one setting of a YAML file may have, because messages and checks write values out."""


EXTENDS = "extends"
"""Key under which a file names others, whose settings hold unless it gives them itself."""
MOST_FILES = 100
"""Files that one `--config` reads at most, counted as often as they are named."""


@dataclass(frozen=True)
class SettingsFile:
    """The settings in one YAML file alone."""

    path: Path
    values: dict[str, object]


def read_settings(config: str) -> list[SettingsFile]:
    """Return the files that `--config` names, with commas between them, and the files that they extend; later ones win.

    Raises:
        UsageError: a file cannot be read, or extends itself. The message names the file and the one that extends it.
    """
    found: list[SettingsFile] = []
    for name in config.split(","):
        if not name.strip():
            raise UsageError(f"--config {config}: a name is missing beside a comma")
        _read_extended(Path(os.path.expanduser(name.strip())), (), found)
    return found


def _read_extended(path: Path, above: tuple[Path, ...], found: list[SettingsFile]) -> None:
    """Add a file to those found, behind all that it extends; `above` are the files through which it was reached."""
    named = f"--config {f' {EXTENDS} '.join(map(str, (*above, path)))}"
    if path.resolve() in {file.resolve() for file in above}:
        raise UsageError(f"{named}: a file cannot extend itself")
    if len(found) + len(above) >= MOST_FILES:
        raise UsageError(f"{named}: more than {MOST_FILES} files")
    values = read_yaml(path, named=named)
    for name in _extended_names(values.pop(EXTENDS, None), named):
        _read_extended(path.parent / os.path.expanduser(name), (*above, path), found)
    found.append(SettingsFile(path, values))


def _extended_names(value: object, named: str) -> list[str]:
    """Return the names under `extends`: none, one or a list. Raise UsageError for anything else."""
    given = value if isinstance(value, list) else [] if value is None else [value]
    names = [name for name in given if isinstance(name, str) and name]
    if len(names) < len(given):
        raise UsageError(f"{named}: {EXTENDS} {shown(value)}: must be a file, or a list of files")
    return names


def read_yaml(path: Path, *, named: str | None = None) -> dict[str, object]:
    """Return the settings in a YAML file. Raise UsageError that names file and line; the file by `named` if given."""
    named = named or f"--config {path}"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
        endless = _endless_settings(values)
    except OSError as error:
        raise UsageError(f"{named}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{named}: not a text file in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{named}{where}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    except RecursionError:
        raise UsageError(f"{named}: brackets or indents are nested too deep") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{named}: must be lines of `setting: value`, not a {type(values).__name__}")
    if endless:
        raise UsageError(f"{named}: {endless[0]}")
    return {str(key): value for key, value in values.items()}


def _endless_settings(values: object) -> list[str]:
    """Return complaints about settings that contain themselves, as in `&x [*x]`, or grow out of bounds by aliases."""
    sizes: dict[int, float] = {}
    found = []
    for name, value in values.items() if isinstance(values, dict) else ():
        size = _written_out_size(value, sizes)
        if size == math.inf:
            found.append(f"{name} contains itself")
        elif size > LARGEST_VALUE:
            found.append(f"{name} has more than {LARGEST_VALUE:,} characters or items with its aliases written out")
    return found


def _written_out_size(value: object, sizes: dict[int, float]) -> float:
    """Return the number of characters and items of a value, at most one above the bound; infinite for a cycle.

    `sizes` keeps the results by identity: a value that many aliases share is visited once.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = math.inf  # found again on the way down: the value contains itself
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        total = 1 + sum(_written_out_size(part, sizes) for part in parts)
        sizes[id(value)] = total if total == math.inf else min(total, LARGEST_VALUE + 1)
    return sizes[id(value)]


class _StrictLoader(yaml.SafeLoader):
    """YAML with plain keys, in which a key written twice is an error instead of the last one winning."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Return the value of a node; a text that its tag cannot read is an error of YAML with its line."""
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # Python refuses to write out a long hexadecimal number, so no message could show it
        except (ArithmeticError, AttributeError, LookupError, ValueError):
            problem = f"{shown(node.value)} is no {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return value

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be one word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given more than once", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(cast("yaml.MappingNode", node), deep)
