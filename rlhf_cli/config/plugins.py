"""Settings with a built-in name or user code, given as `file.py:NAME` or `module:NAME`.

Annotate such a setting with `Plugin`: `policy_loss: Annotated[str, Plugin(...)]`. Validation makes file paths absolute,
so that ranks and actors in other folders find the code. `require_plugins` loads it when a command starts.
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
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from rlhf_cli.errors import UsageError, did_you_mean, listed, one_line

FORMS = "file.py:NAME or module:NAME"


@dataclass(frozen=True, slots=True)
class Plugin:
    """Built-in names of a setting, and the interface that user code must have.

    - `parameters`: argument names of a function, in order.
    - `records`: object types that are accepted instead of a function.
    - `methods`: methods that a class must have.
    - `is_called`: whether names accept numbers, such as `cosine(max_len=2048)`. The setting's group checks them.
    - `may_have_settings`: whether a record may have a settings group, `settings`, with additional flags.
    """

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    records: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    is_called: bool = False
    may_have_settings: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the annotated type's schema, followed by the name check."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        """Return the setting with absolute paths, also per list item. Raises ValueError for unknown names."""
        if isinstance(value, list):
            return [self._checked(item) for item in value]
        if value is None or value in self.names:
            # Names come first: a built-in name never refers to code.
            return value
        if self.is_called:
            head = called_name(value)
            # Keep the parameters, which the setting's group parses.
            return absolute(head) + value.strip()[len(head) :] if is_target(head) else value
        if is_target(value):
            return absolute(value)
        comma = "," if len(self.names) > 1 else ""
        names = f"{listed(self.names, 'or')}{comma} or " if self.names else ""
        raise ValueError(f"must be {names}code as {FORMS}")

    def fault_of(self, found: Any) -> str | None:
        """Return why a loaded object is unusable, or None."""
        # Compare by name, because importing the class would make every command slow.
        if type(found).__name__ in self.records:
            return None
        if not callable(found):
            return f"is {found!r}, which cannot be called"
        if missing := [name for name in self.methods if inspect.isclass(found) and not hasattr(found, name)]:
            return f"has no method {missing[0]}; it needs {', '.join(self.methods)}"
        try:
            # Binding also accepts functions with more, optional arguments.
            inspect.signature(found).bind(*self.parameters)
        except TypeError:
            count = len(self.parameters)
            return f"has to take {count} argument{'s' if count > 1 else ''}: {', '.join(self.parameters)}"
        except ValueError:
            return None  # some functions in C have no signature
        return None


class Target(NamedTuple):
    """User code named by a setting."""

    setting: str
    plugin: Plugin
    text: str


def called_name(text: str) -> str:
    """Return the name in `name(parameter=1)` or `name`."""
    return text.partition("(")[0].strip()


def is_target(text: str) -> bool:
    """Return whether the text refers to code, as `file.py:NAME` or `module:NAME`."""
    place, _, name = text.rpartition(":")
    # A Windows path or URL has a colon too, but its last part is no identifier.
    return name.isidentifier() and (is_file(text) or all(part.isidentifier() for part in place.split(".")))


def is_file(text: str) -> bool:
    """Return whether the code is in a file."""
    return text.rpartition(":")[0].endswith(".py")


def absolute(text: str) -> str:
    """Make a target's file path absolute. Modules are unchanged."""
    place, _, name = text.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if is_file(text) else text


def targets_of(config: BaseModel) -> Iterator[Target]:
    """Yield all user code in a command's settings."""
    for _, settings in config:
        for name, field in type(settings).model_fields.items():
            value = getattr(settings, name)
            for plugin in (mark for mark in field.metadata if isinstance(mark, Plugin)):
                texts = [text for text in (value if isinstance(value, list) else [value]) if text]
                heads = [called_name(text) if plugin.is_called else text for text in texts]
                yield from (Target(name, plugin, head) for head in heads if is_target(head))


def require_plugins(config: BaseModel) -> None:
    """Load the user code in the settings. Raises UsageError if it is not loadable or usable."""
    for target in targets_of(config):
        loaded(target)


def loaded(target: Target) -> Any:
    """Load a target. Raises UsageError if it is not loadable or usable."""
    setting, plugin, text = target
    try:
        found = load_target(text, plugin)
    except UsageError as error:
        raise UsageError(f"--{setting} {text}: {error}") from error
    if fault := plugin.fault_of(found):
        raise UsageError(f"--{setting} {text}: {text.rpartition(':')[2]} {fault}")
    return found


def group_of_code(setting: str) -> str:
    """Return the name of the settings group declared by user code in `setting`."""
    return f"{setting}_settings"


# Cached, so that a file runs once even if several settings refer to it.
@cache
def load_target(text: str, plugin: Plugin | None = None) -> Any:
    """Load the object `file.py:NAME` or `module:NAME`. Raises UsageError if it does not exist.

    With `plugin`, the error lists only names that the setting can use.
    """
    place, _, name = text.rpartition(":")
    if is_file(text) and not Path(place).is_file():
        raise UsageError(f"there is no file {place}")
    try:
        module = _module_of(text)
    except SyntaxError as error:
        raise UsageError(f"line {error.lineno} of {error.filename} is not valid Python: {error.msg}") from error
    except (Exception, SystemExit) as error:  # a script that calls sys.exit must not end this process
        raise UsageError(f"the import of {place} raises {type(error).__name__}: {one_line(error)}") from error
    if not hasattr(module, name):
        own = _names_in(module, plugin)
        hint = did_you_mean(name, own)
        raise UsageError(f"{place} has no {name}{hint}; it has {', '.join(own) or 'no function'}")
    return getattr(module, name)


def _names_in(module: ModuleType, plugin: Plugin | None) -> list[str]:
    """Return the names that a module defines itself, and that the setting can use."""
    records = plugin.records if plugin else ()
    found = []
    for name, value in vars(module).items():
        # A record has the module of its class.
        is_own = getattr(value, "__module__", "") == module.__name__ or type(value).__name__ in records
        if is_own and (plugin is None or not plugin.fault_of(value)):
            found.append(name)
    return found


def records_of(text: str, plugin: Plugin) -> dict[str, Any]:
    """Return the records in the module of user code, by name."""
    module = _module_of(text)
    return {name: value for name, value in vars(module).items() if type(value).__name__ in plugin.records}


def _module_of(text: str) -> ModuleType:
    place = text.rpartition(":")[0]
    return _module_of_file(Path(place)) if is_file(text) else importlib.import_module(place)


@cache
def _module_of_file(path: Path) -> ModuleType:
    """Load a file as a module that may import modules in its folder. All names in a file share the module."""
    # The hash separates files with the same name in different folders.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle in the file look their module up
    # Appended, so that the file's neighbors cannot hide installed packages.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    # A half-loaded module must not be found by a later import.
    except BaseException:
        del sys.modules[name]
        raise
    return module


def contents_of_plugins(config: BaseModel) -> dict[str, str]:
    """Hash the files of user code, keyed by setting."""
    found: dict[str, list[str]] = {}
    for target in targets_of(config):
        found.setdefault(target.setting, []).append(contents_of(target.text))
    return {setting: "+".join(hashes) for setting, hashes in found.items()}


def contents_of(text: str) -> str:
    """Hash the file of user code, "" if it does not exist."""
    place = text.rpartition(":")[0]
    # Importing is necessary to find the file of a module.
    path = place if is_file(text) else getattr(importlib.import_module(place), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32] if path and Path(path).is_file() else ""


def without_folder(value: Any) -> Any:
    """Reduce file paths in a setting to file names, because a moved folder contains the same code."""
    if isinstance(value, list):
        return [without_folder(item) for item in value]
    if not isinstance(value, str):
        return value
    head = called_name(value)
    return Path(head).name + value[len(head) :] if is_target(head) and is_file(head) else value
