"""The class of a user's environment file: how it is found, its tools, and the columns that its `reset` takes.

The file itself is imported only in the processes of environments (fork_server.py), never in the driver.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from rlhf_cli.errors import one_line
from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.workers.user_module import import_file

OWN_NAME = "Environment"

_OPENRLHF_AGENT = re.compile(r"^class\s+Agent(?:Instance|Executor)\b", re.MULTILINE)
_OWN_CLASS = re.compile(rf"^class\s+{OWN_NAME}\b", re.MULTILINE)

NOT_TOOLS = ("reset", "step", "close", "get_reward", "render")
"""Public methods that a model cannot call."""


@dataclass(frozen=True, slots=True)
class ResetColumns:
    """The columns of a row that `reset` takes: names with and without a default, or all of them (`**row`)."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    def missing(self, columns: Collection[str]) -> str | None:
        """Return the end of a sentence about the first column that is needed and not there, else None.

        `seed` is always there: a row without it gets the episode's own.
        """
        lacking = [name for name in self.required if name not in columns and name != "seed"]
        if not lacking:
            return None
        return f"needs the column {lacking[0]!r} in reset; the row has {', '.join(columns) or 'no column'}"

    def arguments(self, row: Mapping[str, object], seed: int) -> dict[str, object]:
        """Return the arguments of `reset`."""
        named = {*self.required, *self.optional}
        given = {name: value for name, value in row.items() if self.takes_all or name in named}
        return {"seed": seed} | given if "seed" in named else given


class ClassFacts(TypedDict):
    """The facts about a class that the driver gets. `about` describes how the model reaches it.

    With `has_close` an object is closed at the end of its episode, not just killed; with `owns_reward` its
    `get_reward` computes the reward then.
    """

    name: str
    about: str
    has_close: bool
    owns_reward: bool
    tools: list[dict[str, object]]
    columns: ResetColumns


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """A user's class. Without tools it reads the text of turns by `step`."""

    type: type
    tools: tuple[str, ...]
    columns: ResetColumns
    names_reward: bool

    @property
    def has_step(self) -> bool:
        return not self.tools

    @property
    def about(self) -> str:
        if self.tools:
            return f"tools {', '.join(self.tools)}"
        others = [name for name in _tools(self.type) if name in vars(self.type)]
        beside = f", so {', '.join(others)} cannot be called" if others else ""
        return f"step reads the text of each turn{beside}"

    @property
    def has_close(self) -> bool:
        return callable(getattr(self.type, "close", None))

    @property
    def owns_reward(self) -> bool:
        """Whether `get_reward` computes the reward when the episode ends."""
        return callable(getattr(self.type, "get_reward", None))

    @property
    def gives_reward(self) -> bool:
        """Whether an episode without the attribute `reward` has the reward 0.

        A class that sets the attribute in a tool gives 0 if the model does not call that tool; a class whose code never
        names it, and which has no other way, gives none.
        """
        return self.owns_reward or self.has_step or self.names_reward


def load_class(path: Path, name: str | None) -> EnvironmentClass:
    """Return the environment of a file: the class of that name, or `Environment`, or the only class that can be one.

    Raises:
        BadResult: there is no such class; the message ends the sentence "calculator.py ...".
        Exception: whatever the file raises while it is imported.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if _OPENRLHF_AGENT.search(text) and not _OWN_CLASS.search(text):
        raise BadResult(
            "is an agent of OpenRLHF: write it as class Environment with reset(self, **row), which gets the columns of "
            "the row, and step(self, text), which returns the feedback without marks of a template, the reward and "
            "whether the episode is done (docs/coming-from.md has an example)"
        )
    module = import_file(path, "environment_file")
    return described(_named(module, name) if name or hasattr(module, OWN_NAME) else _only(module))


def described(found: type) -> EnvironmentClass:
    """Return the form of a class. Raises BadResult if it has none."""
    if (needed := _first_needed(found)) is not None:
        raise BadResult(f"has {found.__name__}.__init__, which needs {needed!r}: an object is made without arguments")
    reset = getattr(found, "reset", None)
    if not callable(reset):
        raise BadResult(f"has class {found.__name__} without a method reset")
    has_step = callable(getattr(found, "step", None))
    if has_step and not _takes_text(found):
        raise BadResult(f"has {found.__name__}.step, which has to take the text of a turn: step(self, text)")
    tools = () if has_step else _tools(found)
    if not has_step and not tools:
        raise BadResult(f"has class {found.__name__} without tools: give it public methods, or step(text)")
    return EnvironmentClass(found, tools, _columns(reset), _names_reward(found))


def _first_needed(found: type) -> str | None:
    """Return the first argument that a class cannot be made without, None if it needs no argument."""
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        return str(error).rpartition(": ")[2].strip("'")
    except ValueError:
        return None  # some classes in C have no signature
    return None


def _takes_text(found: type) -> bool:
    step = inspect.getattr_static(found, "step")
    given = ("text",) if isinstance(step, staticmethod | classmethod) else ("self", "text")
    try:
        inspect.signature(getattr(found, "step")).bind(*given)  # noqa: B009 - of any class
    except TypeError:
        return False
    except ValueError:
        return True  # some methods in C have no signature
    return True


def _named(module: object, name: str | None) -> type:
    found = getattr(module, name or OWN_NAME, None)
    if found is None:
        listed = ", ".join(one.__name__ for one in _own_classes(module)) or "none"
        raise BadResult(f"has no class {name}; classes: {listed}")
    if not inspect.isclass(found):
        raise BadResult(f"has {name or OWN_NAME}, but it is not a class")
    return found


def _only(module: object) -> type:
    """Return the only class with `reset` and with `step` or tools."""
    found = [one for one in _own_classes(module) if hasattr(one, "reset") and (hasattr(one, "step") or _tools(one))]
    if not found:
        raise BadResult(f"has no class {OWN_NAME}, nor another one with reset and public methods")
    if len(found) > 1:
        listed = ", ".join(one.__name__ for one in found)
        raise BadResult(f"has several classes with reset: {listed}; name one as FILE.py:{found[0].__name__}")
    return found[0]


def _own_classes(module: object) -> list[type]:
    """Return the classes that the file itself defines."""
    name = getattr(module, "__name__", None)
    return [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == name and _is_public(one)]


def _is_public(one: type) -> bool:
    return not one.__name__.startswith("_") and not inspect.isabstract(one)


def _tools(found: type) -> tuple[str, ...]:
    """Return the names of the tools, which `inspect` sorts."""
    members = inspect.getmembers(found, inspect.isfunction)
    return tuple(name for name, _ in members if not name.startswith("_") and name not in NOT_TOOLS)


def _names_reward(found: type) -> bool:
    """Return whether `reward` is named in the code of a class or of its bases, or in their files outside of classes."""
    bases = [one for one in found.__mro__ if one is not object]
    names = {one.__name__ for one in bases}
    return any(
        _is_reward(node)
        for one in bases
        for part in _parts(one)
        if not isinstance(part, ast.ClassDef) or part.name in names
        for node in ast.walk(part)
    )


def _parts(one: type) -> list[ast.stmt]:
    """Return the statements of the file of a class; [] if there is none, as for classes in C."""
    try:
        return ast.parse(Path(inspect.getfile(one)).read_text(encoding="utf-8", errors="replace")).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return []


def _is_reward(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="reward") | ast.Name(id="reward") | ast.keyword(arg="reward"):
            return True
        case ast.Constant(value=value):
            return bool(value == "reward")  # in setattr or in a dict
    return False


def _columns(reset: Callable[..., object]) -> ResetColumns:
    parameters = list(inspect.signature(reset).parameters.values())[1:]  # without self
    kinds = inspect.Parameter
    named = [one for one in parameters if one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    return ResetColumns(
        required=tuple(one.name for one in named if one.default is kinds.empty),
        optional=tuple(one.name for one in named if one.default is not kinds.empty),
        takes_all=any(one.kind is kinds.VAR_KEYWORD for one in parameters),
    )


def tool_schemas(found: EnvironmentClass) -> list[dict[str, object]]:
    """Return the JSON schemas of the tools, from their signatures and docstrings, as transformers makes them.

    Raises:
        BadResult: a method lacks a docstring, the description of an argument, or a type hint.
    """
    if not found.tools:
        return []
    from transformers.utils import chat_template_utils

    if "torch" not in sys.modules:  # then no type hint is a tensor, and the import would take a second of CPU
        chat_template_utils.is_torch_available = lambda: False  # type: ignore[attr-defined]
    schemas = []
    for name in found.tools:
        try:
            schemas.append(chat_template_utils.get_json_schema(getattr(found.type, name)))
        except Exception as error:
            raise BadResult(
                f"has {found.type.__name__}.{name}, which cannot be a tool: {one_line(error).rstrip('.!')}. "
                "A tool has a docstring, type hints, and under `Args:` a line for each argument; a method that is no "
                "tool begins with _"
            ) from error
    return schemas
