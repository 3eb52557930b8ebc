"""The fields of a config class as flags: names, types, limits, defaults, and descriptions in words.

options.py reads and checks values.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic_core import PydanticUndefined

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plugins import FORMS, Plugin
from rlhf_cli.errors import listed

RESERVED = {"config", "local_rank", "help"}  # flags every command has besides its settings


class Flag(NamedTuple):
    """One setting, written --`name`: field `attribute` of group `group`.

    Both are the same word unless the word is one of Python's own: then the name is the field's alias.
    """

    name: str
    attribute: str
    group: str
    panel: str
    annotation: object  # without None; `optional` is true if None is allowed
    optional: bool
    limits: tuple[object, ...]  # annotated_types of the field: Gt, Ge, Lt, Le
    default: object  # PydanticUndefined when the setting is required
    help: str

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined

    @property
    def takes(self) -> int:
        """Values the flag takes on the command line."""
        return 0 if self.annotation is bool else len(get_args(self.annotation)) if self._is(tuple) else 1

    @property
    def choices(self) -> tuple[object, ...]:
        return get_args(self.annotation) if self._is(Literal) else self.plugin.names if self.plugin else ()

    @property
    def plugin(self) -> Plugin | None:
        """The names and the form of others' code, if the setting takes such code."""
        return next((limit for limit in self.limits if isinstance(limit, Plugin)), None)

    @property
    def is_list(self) -> bool:
        return self._is(list)

    def _is(self, origin: object) -> bool:
        return get_origin(self.annotation) is origin


def config_class(run: Callable[..., None]) -> type[CommandConfig]:
    """Return the config class that a command function `run(config: XConfig)` asks for."""
    cls = get_type_hints(run)["config"]
    assert issubclass(cls, CommandConfig)
    return cls


def flags_of(config_cls: type[CommandConfig]) -> dict[str, Flag]:
    """Return every flag of a config class by name, in declaration order.

    Raises:
        TypeError: two groups declare the same name, or a name that every command already has.
    """
    flags: dict[str, Flag] = {}
    for group, outer in config_cls.model_fields.items():
        group_cls = config_cls.group_class(group)
        for attribute in config_cls.supported(group):
            field = group_cls.model_fields[attribute]
            name = field.alias or attribute
            if name in flags or name in RESERVED:
                other = f"in {flags[name].group}" if name in flags else "of every command"
                raise TypeError(f"{config_cls.__name__}: --{name} of {group} is already a flag {other}")
            members = [member for member in get_args(field.annotation) if member is not NoneType]
            optional = NoneType in get_args(field.annotation)
            # A field that the command leaves alone has the group's default: `auto`, not the choice on this machine.
            is_set = not outer.is_required() and attribute in outer.default.model_fields_set
            flags[name] = Flag(
                name=name,
                attribute=attribute,
                group=group,
                panel=(group_cls.__doc__ or group).splitlines()[0].rstrip("."),
                annotation=members[0] if optional else field.annotation,
                optional=optional,
                limits=tuple(field.metadata),
                default=getattr(outer.default, attribute) if is_set else field.default,
                help=(field.description or "").replace("\n", " "),
            )
    return flags


def describe(flag: Flag) -> str:
    """Return the values that a flag takes and its default, in the words of help pages."""
    if flag.takes == 0:
        turns_off = f"--no_{flag.name} turns it off"
        if flag.default is None:
            return f"auto by default; {turns_off}"
        return f"on by default; {turns_off}" if flag.default else "off by default"
    if flag.required:
        return f"{expected(flag)}; required"
    if flag.default is None or flag.default == []:
        return expected(flag)
    default = ",".join(map(str, flag.default)) if isinstance(flag.default, list) else shown(flag.default)
    return f"{expected(flag)}; default {default}"


def expected(flag: Flag) -> str:
    """Return the allowed values of this flag in words: 'an integer > 0', 'bf16 or fp32', '2 numbers'."""
    if flag.choices:
        choices = listed(map(str, flag.choices), "or")
        several = ", separated by commas" if flag.is_list else ""
        return f"{choices}, or {FORMS}{several}" if flag.plugin else choices
    if flag.plugin:
        return FORMS
    if flag.takes > 1:
        return f"{flag.takes} {_TYPE_NAMES[get_args(flag.annotation)[0]][1]}"
    if flag.is_list:
        return f"{_TYPE_NAMES[get_args(flag.annotation)[0]][1]} separated by commas"
    if flag.annotation is bool and flag.optional:
        return "true, false or auto"
    name = _TYPE_NAMES[flag.annotation][0]
    bounds = _bounds(flag.limits)
    return f"{name} {bounds}" if bounds else name


_TYPE_NAMES: dict[object, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "words"),
    bool: ("true or false", "true or false"),
    Path: ("a path", "paths"),
}


def _bounds(limits: Sequence[object]) -> str:
    found = {
        kind: getattr(limit, kind) for limit in limits for kind in ("gt", "ge", "lt", "le") if hasattr(limit, kind)
    }
    if found.keys() == {"ge", "le"}:
        return f"from {found['ge']} to {found['le']}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(f"{signs[kind]} {bound}" for kind, bound in found.items())


LONGEST_SHOWN = 300
"""Characters of a value that a message shows; a longer value is cut, and its length follows."""


def shown(value: object) -> str:
    """Return a value as one would write it after its flag, cut if it is very long."""
    if isinstance(value, tuple | list):
        text = " ".join(map(shown, value)) or "[]"
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = "''" if value == "" else str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"
