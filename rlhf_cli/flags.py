"""Derives flags from config class fields: names, types, limits, defaults and descriptions.

options.py parses and validates values.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic_core import PydanticUndefined

from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.config.plugins import FORMS, Plugin
from rlhf_cli.errors import listed

# Flags that every command has in addition to its settings.
RESERVED = {"config", "local_rank", "help"}


class Flag(NamedTuple):
    """One setting, written --`name`: field `attribute` in group `group`.

    - `name`: equal to `attribute`, unless that is a Python keyword with the name as alias (`for`).
    - `annotation`: type without None. `optional` is True if None is allowed.
    - `limits`: annotated_types from the field: Gt, Ge, Lt, Le.
    - `default`: PydanticUndefined if the setting is required.
    """

    name: str
    attribute: str
    group: str
    panel: str
    annotation: object
    optional: bool
    limits: tuple[object, ...]
    default: object
    help: str

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined

    @property
    def takes(self) -> int:
        """Number of values on the command line."""
        return 0 if self.annotation is bool else len(get_args(self.annotation)) if self._is(tuple) else 1

    @property
    def choices(self) -> tuple[object, ...]:
        return get_args(self.annotation) if self._is(Literal) else self.plugin.names if self.plugin else ()

    @property
    def plugin(self) -> Plugin | None:
        """Plugin names, if the setting accepts external code."""
        return next((limit for limit in self.limits if isinstance(limit, Plugin)), None)

    @property
    def is_list(self) -> bool:
        return self._is(list)

    def _is(self, origin: object) -> bool:
        return get_origin(self.annotation) is origin


def config_class(run: Callable[..., None]) -> type[CommandConfig]:
    """Return the config class from a command function's annotation, `run(config: XConfig)`."""
    cls = get_type_hints(run)["config"]
    assert issubclass(cls, CommandConfig)
    return cls


@cache
def flags_of(config_cls: type[CommandConfig]) -> dict[str, Flag]:
    """Return a config class's flags by name, in declaration order. The dict is shared: do not change it.

    Raises:
        TypeError: two groups declare the same name, or a group declares a reserved name.
    """
    flags: dict[str, Flag] = {}
    for group, outer in config_cls.model_fields.items():
        group_cls = config_cls.group_class(group)
        for attribute in config_cls.supported(group):
            field = group_cls.model_fields[attribute]
            name = field.alias or attribute
            if name in flags or name in RESERVED:
                other = f"in {flags[name].group}" if name in flags else "in every command"
                raise TypeError(f"{config_cls.__name__}: --{name} of {group} is already a flag {other}")
            members = [member for member in get_args(field.annotation) if member is not NoneType]
            optional = NoneType in get_args(field.annotation)
            # Unless the command sets the field, show the group's default: `auto`, not the value for this machine.
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
                help=" ".join([(field.description or "").replace("\n", " "), *_conditions(group_cls, attribute)]),
            )
    return flags


def _conditions(group: type[SettingsGroup], name: str) -> list[str]:
    """Return sentences of the help text: on the setting that a setting needs, if that one may be left out, and on those
    that it excludes."""
    need = group.condition_of(name)
    field = None if need is None else group.model_fields.get(need.setting)
    needs = [] if field is None or field.is_required() else [f"Needs {need}."]
    return needs + [f"Not with --{other}." for other in group.excluded_by(name)]


def describe(flag: Flag) -> str:
    """Describe a flag's allowed values and default, for help pages."""
    if flag.takes == 0:
        turns_off = f"--no_{flag.name} turns it off"
        if flag.default is None:
            return f"auto by default; {turns_off}"
        return f"on by default; {turns_off}" if flag.default else "off by default"
    if flag.required:
        return f"{expected(flag)}; required"
    if flag.default in (None, [], ""):
        return expected(flag)
    default = ",".join(map(str, flag.default)) if isinstance(flag.default, list) else shown(flag.default)
    return f"{expected(flag)}; default {default}"


def expected(flag: Flag) -> str:
    """Describe a flag's allowed values: 'an integer > 0', 'bf16 or fp32', '2 numbers'."""
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
    bounds = {
        kind: getattr(limit, kind) for limit in limits for kind in ("gt", "ge", "lt", "le") if hasattr(limit, kind)
    }
    if bounds.keys() == {"ge", "le"}:
        return f"from {bounds['ge']} to {bounds['le']}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(f"{signs[kind]} {bound}" for kind, bound in bounds.items())


_LONGEST_SHOWN = 300
"""Maximum characters shown for a value in a message. Longer values are truncated, followed by their length."""


def shown(value: object) -> str:
    """Format a value as on the command line, truncated if it is very long."""
    if isinstance(value, tuple | list):
        text = " ".join(map(shown, value)) or "[]"
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = "''" if value == "" else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text):,} characters)"
