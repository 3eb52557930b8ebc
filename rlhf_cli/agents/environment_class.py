"""Inspection of a user's environment class: lookup, tools and the columns that `reset` accepts.

The file is imported only in environment processes (fork_server.py), never in the driver.
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

_OWN_NAME = "Environment"

_OPENRLHF_AGENT = re.compile(r"^class\s+Agent(?:Instance|Executor)\b", re.MULTILINE)
_OWN_CLASS = re.compile(rf"^class\s+{_OWN_NAME}\b", re.MULTILINE)

_NOT_TOOLS = ("reset", "step", "close", "get_reward", "render")
"""Public methods that are never tools."""


@dataclass(frozen=True, slots=True)
class ResetColumns:
    """Row columns that `reset` accepts: required and optional parameter names, or all columns (`**row`)."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    def missing(self, columns: Collection[str]) -> str | None:
        """Describe the first missing required column, as the end of a sentence. Returns None if none is missing.

        `seed` is never missing: a row without it gets the episode seed.
        """
        lacking = [name for name in self.required if name not in columns and name != "seed"]
        if not lacking:
            return None
        return f"needs the column {lacking[0]!r} in reset; the row has {', '.join(columns) or 'no column'}"

    def arguments(self, row: Mapping[str, object], seed: int) -> dict[str, object]:
        """Build the keyword arguments for `reset`."""
        named = {*self.required, *self.optional}
        given = {name: value for name, value in row.items() if self.takes_all or name in named}
        return {"seed": seed} | given if "seed" in named else given


class ClassFacts(TypedDict):
    """What the driver learns about a class.

    - `about`: how the model interacts with it, for the startup log.
    - `has_close`: close the object at the end of the episode instead of only killing the process.
    - `owns_reward`: `get_reward` computes the reward at the end of the episode.
    """

    name: str
    about: str
    has_close: bool
    owns_reward: bool
    tools: list[dict[str, object]]
    columns: ResetColumns


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """A user's environment class. A class without tools reads the text of each turn in `step`."""

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
        ignored = f", so {', '.join(others)} cannot be called" if others else ""
        return f"step reads the text of each turn{ignored}"

    @property
    def has_close(self) -> bool:
        return callable(getattr(self.type, "close", None))

    @property
    def owns_reward(self) -> bool:
        """Whether `get_reward` computes the reward when the episode ends."""
        return callable(getattr(self.type, "get_reward", None))

    @property
    def gives_reward(self) -> bool:
        """Whether an episode that never sets the attribute `reward` has reward 0 instead of no reward.

        True if any code path could set a reward: then the model's actions led to 0. A class that never mentions
        `reward`, and has no other way to compute one, gives no reward.
        """
        return self.owns_reward or self.has_step or self.names_reward


def load_class(path: Path, name: str | None) -> EnvironmentClass:
    """Load the environment class from a file: the named class, else `Environment`, else the only candidate.

    Raises:
        BadResult: there is no such class. The message completes "calculator.py ...".
        Exception: any exception raised during import.
    """
    # Detected by text: importing an OpenRLHF agent may fail because openrlhf is not installed.
    text = path.read_text(encoding="utf-8", errors="replace")
    if _OPENRLHF_AGENT.search(text) and not _OWN_CLASS.search(text):
        raise BadResult(
            "is an OpenRLHF agent: rewrite it as class Environment with reset(self, **row), which receives the row's "
            "columns, and step(self, text), which returns the feedback without template tokens, the reward and "
            "whether the episode is done (docs/coming-from.md has an example)"
        )
    module = import_file(path, "environment_file")
    return described(_named(module, name) if name or hasattr(module, _OWN_NAME) else _only(module))


def described(cls: type) -> EnvironmentClass:
    """Inspect a class. Raises BadResult if it is not a valid environment."""
    if (needed := _first_needed(cls)) is not None:
        raise BadResult(f"has {cls.__name__}.__init__, which requires {needed!r}: it is called without arguments")
    reset = getattr(cls, "reset", None)
    if not callable(reset):
        raise BadResult(f"has class {cls.__name__} without a method reset")
    has_step = callable(getattr(cls, "step", None))
    if has_step and not _takes_text(cls):
        raise BadResult(f"has {cls.__name__}.step, which must accept the text of a turn: step(self, text)")
    tools = () if has_step else _tools(cls)
    if not has_step and not tools:
        raise BadResult(f"has class {cls.__name__} without tools: add public methods, or step(text)")
    return EnvironmentClass(cls, tools, _columns(reset), _names_reward(cls))


def _first_needed(cls: type) -> str | None:
    """Return the first required constructor argument, or None."""
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        # inspect's message is "missing a required argument: 'size'".
        return str(error).rpartition(": ")[2].strip("'")
    # Some classes written in C have no signature.
    except ValueError:
        return None
    return None


def _takes_text(cls: type) -> bool:
    step = inspect.getattr_static(cls, "step")
    given = ("text",) if isinstance(step, staticmethod | classmethod) else ("self", "text")
    try:
        # getattr with a constant: mypy rejects `cls.step` on `type`.
        inspect.signature(getattr(cls, "step")).bind(*given)  # noqa: B009
    except TypeError:
        return False
    # Some methods written in C have no signature.
    except ValueError:
        return True
    return True


def _named(module: object, name: str | None) -> type:
    cls = getattr(module, name or _OWN_NAME, None)
    if cls is None:
        listed = ", ".join(one.__name__ for one in _own_classes(module)) or "none"
        raise BadResult(f"has no class {name}; classes: {listed}")
    if not inspect.isclass(cls):
        raise BadResult(f"has {name or _OWN_NAME}, but it is not a class")
    return cls


def _only(module: object) -> type:
    """Return the only class that has `reset`, and `step` or tools."""
    found = [one for one in _own_classes(module) if hasattr(one, "reset") and (hasattr(one, "step") or _tools(one))]
    if not found:
        raise BadResult(f"has no class {_OWN_NAME}, and no other class with reset and public methods")
    if len(found) > 1:
        listed = ", ".join(one.__name__ for one in found)
        raise BadResult(f"has more than one class with reset: {listed}; pass FILE.py:{found[0].__name__}")
    return found[0]


def _own_classes(module: object) -> list[type]:
    """Return public classes defined in the file, without imported ones."""
    name = getattr(module, "__name__", None)
    return [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == name and _is_public(one)]


def _is_public(one: type) -> bool:
    return not one.__name__.startswith("_") and not inspect.isabstract(one)


def _tools(cls: type) -> tuple[str, ...]:
    """Return the tool names, sorted by `inspect`."""
    members = inspect.getmembers(cls, inspect.isfunction)
    return tuple(name for name, _ in members if not name.startswith("_") and name not in _NOT_TOOLS)


def _names_reward(cls: type) -> bool:
    """Return whether the source mentions `reward`: in the class, base classes, or their modules."""
    # Other classes in these modules do not count: a file may define several environments.
    bases = [one for one in cls.__mro__ if one is not object]
    names = {one.__name__ for one in bases}
    return any(
        _is_reward(node)
        for one in bases
        for part in _parts(one)
        if not isinstance(part, ast.ClassDef) or part.name in names
        for node in ast.walk(part)
    )


def _parts(one: type) -> list[ast.stmt]:
    """Parse the source file of a class. Returns [] without a source, for example for classes written in C."""
    try:
        return ast.parse(Path(inspect.getfile(one)).read_text(encoding="utf-8", errors="replace")).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return []


def _is_reward(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="reward") | ast.Name(id="reward") | ast.keyword(arg="reward"):
            return True
        case ast.Constant(value=value):
            # As in setattr(self, "reward", 1.0) or vars(self).update({"reward": 1.0}).
            return bool(value == "reward")
    return False


def _columns(reset: Callable[..., object]) -> ResetColumns:
    # [1:] skips self.
    parameters = list(inspect.signature(reset).parameters.values())[1:]
    kinds = inspect.Parameter
    named = [one for one in parameters if one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    return ResetColumns(
        required=tuple(one.name for one in named if one.default is kinds.empty),
        optional=tuple(one.name for one in named if one.default is not kinds.empty),
        takes_all=any(one.kind is kinds.VAR_KEYWORD for one in parameters),
    )


def tool_schemas(environment: EnvironmentClass) -> list[dict[str, object]]:
    """Build JSON schemas for the tools from signatures and docstrings, with transformers.

    Raises:
        BadResult: a method has no docstring, or an argument has no description or type hint.
    """
    if not environment.tools:
        return []
    from transformers.utils import chat_template_utils

    # Without torch loaded, no type hint can be a tensor. Importing torch only for this check costs a CPU second.
    if "torch" not in sys.modules:
        chat_template_utils.is_torch_available = lambda: False  # type: ignore[attr-defined]
    schemas = []
    for name in environment.tools:
        try:
            schemas.append(chat_template_utils.get_json_schema(getattr(environment.type, name)))
        except Exception as error:
            raise BadResult(
                f"has {environment.type.__name__}.{name}, which cannot be a tool: {one_line(error).rstrip('.!')}. "
                "A tool requires a docstring, type hints, and one line per argument under `Args:`; prefix other "
                "methods with _"
            ) from error
    return schemas
