"""Settings that take a name of a table, or code of others as `file.py:NAME` or `module:NAME`.

`Plugin` marks such a setting: `policy_loss: Annotated[str, Plugin(...)]`. Validation makes the path of a file absolute,
so that ranks and actors in other folders find it. `require_plugins` loads the code when a command begins.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from rlhf_cli.errors import UsageError, listed, one_line

FORMS = "file.py:NAME or module:NAME"


@dataclass(frozen=True, slots=True)
class Plugin:
    """The names of a table, and the form that code of others must have.

    `parameters`: names of the arguments of a function, in order; `records`: types of objects that may be given instead;
    `methods`: names that a class must have; `is_called`: a name may have numbers behind it, `cosine(max_len=2048)`,
    which the setting's group checks together with the name; `may_have_settings`: a record may bring a settings group as
    its `settings`, whose fields become flags of the command that names the code.
    """

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    records: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    is_called: bool = False
    may_have_settings: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the annotated type with the check of the name after it."""
        return core_schema.no_info_after_validator_function(self.checked, handler(source))

    def checked(self, value: Any) -> Any:
        """Return a setting with absolute paths, item by item if it is a list. Raise ValueError for another name."""
        if isinstance(value, list):
            return [self.checked(item) for item in value]
        if value is None or value in self.names:
            return value
        if self.is_called:
            head = called_name(value)
            return absolute(head) + value.strip()[len(head) :] if is_target(head) else value
        if is_target(value):
            return absolute(value)
        comma = "," if len(self.names) > 1 else ""
        names = f"{listed(self.names, 'or')}{comma} or " if self.names else ""
        raise ValueError(f"must be {names}code as {FORMS}")

    def fault_of(self, found: Any) -> str | None:
        """Return why an object that was loaded cannot be used, None if it can."""
        if type(found).__name__ in self.records:
            return None
        if not callable(found):
            return f"is {found!r}, which cannot be called"
        if missing := [name for name in self.methods if inspect.isclass(found) and not hasattr(found, name)]:
            return f"has no method {missing[0]}; it needs {', '.join(self.methods)}"
        try:
            inspect.signature(found).bind(*self.parameters)
        except TypeError:
            count = len(self.parameters)
            return f"has to take {count} argument{'s' if count > 1 else ''}: {', '.join(self.parameters)}"
        except ValueError:
            return None  # some functions in C have no signature
        return None


class Target(NamedTuple):
    """Code of others that a setting names."""

    setting: str
    plugin: Plugin
    text: str


def called_name(text: str) -> str:
    """Return the name in `name(parameter=1)` or `name`."""
    return text.partition("(")[0].strip()


def is_target(text: str) -> bool:
    """Return whether a text names code, as `file.py:NAME` or `module:NAME`."""
    place, _, name = text.rpartition(":")
    return name.isidentifier() and (is_file(text) or all(part.isidentifier() for part in place.split(".")))


def is_file(text: str) -> bool:
    """Return whether the code is in a file that is named by its path."""
    return text.rpartition(":")[0].endswith(".py")


def absolute(text: str) -> str:
    """Return a target with the whole path of its file; a module stays as it is."""
    place, _, name = text.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if is_file(text) else text


def targets_of(config: BaseModel) -> Iterator[Target]:
    """Yield all code of others that the settings of a command name."""
    for _, settings in config:
        for name, field in type(settings).model_fields.items():
            value = getattr(settings, name)
            for plugin in (mark for mark in field.metadata if isinstance(mark, Plugin)):
                texts = [text for text in (value if isinstance(value, list) else [value]) if text]
                heads = [called_name(text) if plugin.is_called else text for text in texts]
                yield from (Target(name, plugin, head) for head in heads if is_target(head))


def require_plugins(config: BaseModel) -> None:
    """Load the code of others that the settings name. Raise UsageError for what cannot be loaded or used."""
    for target in targets_of(config):
        loaded(target)


def loaded(target: Target) -> Any:
    """Return the object that a setting names. Raise UsageError if it cannot be loaded or used."""
    setting, plugin, text = target
    try:
        found = load_target(text)
    except UsageError as error:
        raise UsageError(f"--{setting} {text}: {error}") from error
    if fault := plugin.fault_of(found):
        raise UsageError(f"--{setting} {text}: {text.rpartition(':')[2]} {fault}")
    return found


def group_of_code(setting: str) -> str:
    """Return the name of the group with the settings that the code named by `setting` brings."""
    return f"{setting}_settings"


@cache
def load_target(text: str) -> Any:
    """Return the object that `file.py:NAME` or `module:NAME` names. Raise UsageError if there is none."""
    place, _, name = text.rpartition(":")
    if is_file(text) and not Path(place).is_file():
        raise UsageError(f"there is no file {place}")
    try:
        module = _module_of_file(Path(place)) if is_file(text) else importlib.import_module(place)
    except SyntaxError as error:
        raise UsageError(f"line {error.lineno} of {error.filename} is not valid Python: {error.msg}") from error
    except (Exception, SystemExit) as error:  # a script that ends itself must not end this program with its status
        raise UsageError(f"the import of {place} raises {type(error).__name__}: {one_line(error)}") from error
    if not hasattr(module, name):
        own = [word for word, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise UsageError(f"{place} has no {name}; it has {', '.join(own) or 'no function'}")
    return getattr(module, name)


@cache
def _module_of_file(path: Path) -> Any:
    """Return the file as a module, which may import its neighbours; several names of one file share the module."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle in the file look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def contents_of_plugins(config: BaseModel) -> dict[str, str]:
    """Return a hash of the files of others' code, by the setting that names them."""
    found: dict[str, list[str]] = {}
    for target in targets_of(config):
        found.setdefault(target.setting, []).append(contents_of(target.text))
    return {setting: "+".join(hashes) for setting, hashes in found.items()}


def contents_of(text: str) -> str:
    """Return a hash of the file with the code that a target names, "" if there is no such file."""
    place = text.rpartition(":")[0]
    path = place if is_file(text) else getattr(importlib.import_module(place), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32] if path and Path(path).is_file() else ""


def without_folder(value: Any) -> Any:
    """Return a setting with the bare names of files, because a folder that moved holds the same code."""
    if isinstance(value, list):
        return [without_folder(item) for item in value]
    if not isinstance(value, str):
        return value
    head = called_name(value)
    return Path(head).name + value[len(head) :] if is_target(head) and is_file(head) else value
