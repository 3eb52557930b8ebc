"""Strict YAML settings files (`--config`), with file and line in every error message.

`--config` accepts several files, and `extends` in a file includes base files. Later files take precedence, and a file
takes precedence over its base files.
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

_LARGEST_VALUE = 1_000_000
"""Maximum characters and items in one setting, because messages and checks format values."""


EXTENDS = "extends"
"""Key that lists base files. Settings in the file override those in base files."""
_MOST_FILES = 100
"""Maximum number of files read for one `--config`, with repetitions."""


@dataclass(frozen=True)
class SettingsFile:
    """Settings from one YAML file, without base files."""

    path: Path
    values: dict[str, object]


def read_settings(config: str) -> list[SettingsFile]:
    """Read comma-separated `--config` files and their base files, in order of increasing precedence.

    Raises:
        UsageError: a file cannot be read, or extends itself. The message lists the chain of files.
    """
    files: list[SettingsFile] = []
    for name in config.split(","):
        if not name.strip():
            raise UsageError(f"--config {config}: missing file name next to a comma")
        _read_extended(Path(os.path.expanduser(name.strip())), (), files)
    return files


def _read_extended(path: Path, above: tuple[Path, ...], files: list[SettingsFile]) -> None:
    """Append a file after its base files. `above` holds the files through which it was reached."""
    named = f"--config {f' {EXTENDS} '.join(map(str, (*above, path)))}"
    if path.resolve() in {file.resolve() for file in above}:
        raise UsageError(f"{named}: a file cannot extend itself")
    # Without a cycle, a chain of files that each extend the next one twice still grows exponentially.
    if len(files) + len(above) >= _MOST_FILES:
        raise UsageError(f"{named}: more than {_MOST_FILES} files")
    values = read_yaml(path, named=named)
    for name in _extended_names(values.pop(EXTENDS, None), named):
        _read_extended(path.parent / os.path.expanduser(name), (*above, path), files)
    files.append(SettingsFile(path, values))


def _extended_names(value: object, named: str) -> list[str]:
    """Return the names under `extends`: none, one, or a list. Raises UsageError for other values."""
    given = value if isinstance(value, list) else [] if value is None else [value]
    names = [name for name in given if isinstance(name, str) and name]
    if len(names) < len(given):
        raise UsageError(f"{named}: {EXTENDS} {shown(value)}: must be a file, or a list of files")
    return names


def read_yaml(path: Path, *, named: str | None = None) -> dict[str, object]:
    """Read settings from a YAML file. Raises UsageError with file and line; `named` replaces the file in messages."""
    named = named or f"--config {path}"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
        endless = _endless_settings(values)
    except OSError as error:
        raise UsageError(f"{named}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{named}: not a UTF-8 text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{named}{where}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    except RecursionError:
        raise UsageError(f"{named}: nested too deeply") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{named}: must be lines of `setting: value`, not a {type(values).__name__}")
    if endless:
        raise UsageError(f"{named}: {endless[0]}")
    return {str(key): value for key, value in values.items()}


def _endless_settings(values: object) -> list[str]:
    """Report settings that contain themselves, as in `&x [*x]`, or that become too large when aliases are expanded."""
    sizes: dict[int, float] = {}
    problems = []
    for name, value in values.items() if isinstance(values, dict) else ():
        size = _written_out_size(value, sizes)
        if size == math.inf:
            problems.append(f"{name} contains itself")
        elif size > _LARGEST_VALUE:
            problems.append(f"{name} has more than {_LARGEST_VALUE:,} characters or items after expanding aliases")
    return problems


def _written_out_size(value: object, sizes: dict[int, float]) -> float:
    """Count a value's characters and items, capped just above the limit; infinity for a cycle.

    `sizes` caches results by identity, so that a value shared by many aliases is visited once.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set):
        return 1
    if id(value) not in sizes:
        # Seen again during the recursion, this means that the value contains itself.
        sizes[id(value)] = math.inf
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        total = 1 + sum(_written_out_size(part, sizes) for part in parts)
        sizes[id(value)] = total if total == math.inf else min(total, _LARGEST_VALUE + 1)
    return sizes[id(value)]


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that accepts only scalar keys and rejects duplicate keys, of which YAML would keep the last."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Construct a value. A scalar that its tag cannot parse becomes a YAML error with its line."""
        try:
            value = super().construct_object(node, deep)
            # Python cannot convert a very long hexadecimal number to decimal, so no message could show it.
            if isinstance(value, int):
                str(value)
        except (ArithmeticError, AttributeError, LookupError, ValueError):
            problem = f"{shown(node.value)} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return value

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a single word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given more than once", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(cast("yaml.MappingNode", node), deep)
