"""Base classes for settings groups and command settings."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import to_jsonable_python

from rlhf_cli.config.plugins import group_of_code, is_target

_OUTPUTS = ("output", "save_path", "ckpt_path", "write_pass_rate")
"""Settings with output paths, in any group."""


def object_text(value: Any) -> str:
    """Return a JSON object as text. YAML files may use a mapping."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(found)
    except (ValueError, TypeError, RecursionError) as error:
        # `from None` hides the parser's traceback, which would confuse users.
        raise ValueError(f"must be a JSON object like '{{\"name\": 1}}': {error}") from None
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object like '{\"name\": 1}'")
    return text


JsonObject = Annotated[str, BeforeValidator(object_text), WithJsonSchema({"type": ["string", "object"]})]
"""JSON object as text; YAML files may use a mapping."""


def _ascending(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the ends of a range. Raise ValueError if no number is between them."""
    if ends is not None and not ends[0] < ends[1]:
        raise ValueError(f"{ends[0]:g} {ends[1]:g} is empty: the first must be below the second")
    return ends


Range = Annotated[tuple[float, float] | None, AfterValidator(_ascending)]
"""Two numbers, the first below the second."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The setting without which a setting has no effect.

    `kl_horizon: Annotated[int, Needs("kl_target")] = Field(10_000, gt=0)` rejects a changed `kl_horizon` without
    `kl_target` ("kl_horizon needs --kl_target"), adds the condition to the help text, and a test tries it.
    `needs = Needs("eval_dataset")` in a group applies to all its other settings.

    Args:
        setting: another setting of the group. It is on unless it is None, False, 0, empty or "none".
        values: the values that are required instead. User code (`file.py:NAME`) always qualifies, because it may read
            any setting.
        when: a property of the group that decides instead; `setting` and `values` only make the message. If the group
            has no such property, that of the command decides.
    """

    setting: str
    values: tuple[object, ...] = ()
    when: str = ""

    def is_met(self, group: BaseModel, command: BaseModel | None = None) -> bool:
        """Return whether the condition holds in a group; True if only the command decides, and none is given."""
        if self.when:
            decides = group if hasattr(group, self.when) else command
            return decides is None or bool(getattr(decides, self.when))
        value = getattr(group, self.setting)
        # User code may read any setting, so it never makes one ineffective.
        if isinstance(value, str) and self.values and is_target(value):
            return True
        return value in self.values if self.values else bool(value) and value != "none"

    def __str__(self) -> str:
        """Return the condition as flags: `--zero_stage 3`, `--no_apply_chat_template`."""
        if self.values == (False,):
            return f"--no_{self.setting}"
        return " ".join(filter(None, [f"--{self.setting}", " or ".join(map(str, self.values))]))


@dataclass(frozen=True, slots=True)
class Excludes:
    """Another setting of the group that must keep its default if this one is changed.

    `zpg: Annotated[int, Excludes("param_offload")]` rejects both, adds the rule to the help text, and a test tries it.
    """

    setting: str


class SettingsGroup(BaseModel):
    """Base of settings groups: immutable, without unknown keys. Docstrings are help texts."""

    needs: ClassVar[Needs | None] = None
    """Condition of all settings of the group except the one it names."""

    # Without `validate_default`, because defaults are constants that tests check once.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False)

    @field_validator(*_OUTPUTS, check_fields=False)
    @classmethod
    def _expand_home(cls, path: str | None) -> str | None:
        if path is not None and not path.strip():
            # Typically an unset shell variable.
            raise ValueError("the name of a folder or file is empty")
        return path if path is None else os.path.expanduser(path)

    @classmethod
    def condition_of(cls, name: str) -> Needs | None:
        """Return the condition under which a setting has an effect, None if it always has one."""
        # A condition of the setting itself wins over that of its group.
        own = next((mark for mark in cls.model_fields[name].metadata if isinstance(mark, Needs)), None)
        return own or (cls.needs if cls.needs is not None and name != cls.needs.setting else None)

    @classmethod
    def excluded_by(cls, name: str) -> list[str]:
        """Return the settings that must keep their defaults if this one is changed."""
        return [mark.setting for mark in cls.model_fields[name].metadata if isinstance(mark, Excludes)]

    @model_validator(mode="after")
    def _conditions_hold(self) -> Self:
        self.check_conditions()
        return self

    def check_conditions(self, command: BaseModel | None = None) -> None:
        """Raise ValueError if a setting has no effect in this group, and in its command if one is given."""
        # Only changed settings: defaults must never violate a condition.
        for name in filter(self.changed, self._defaults()):
            need = self.condition_of(name)
            if need is not None and not need.is_met(self, command):
                raise ValueError(f"{name} needs {need}")
            if other := self.changed(*self.excluded_by(name)):
                raise ValueError(f"{name} and {other} exclude each other: set only one")

    def changed(self, *names: str) -> str | None:
        """Return the first of these settings with a non-default value."""
        defaults, values = self._defaults(), vars(self)
        return next((name for name in names if values[name] != defaults[name]), None)

    @classmethod
    @cache
    def _defaults(cls) -> dict[str, Any]:
        """Return the default of each setting. A plan compares them thousands of times, and Pydantic's are slow."""
        return {name: field.default for name, field in cls.model_fields.items()}


class CommandConfig(BaseModel):
    """Settings of a command. Fields are groups, and their settings are the command's flags.

    A group has all settings of its subject. `unsupported` lists groups ("critic") and settings
    ("optim.actor_learning_rate") that the command does not support. They have no flag, are not in config.yaml, and
    keep their defaults, so that code can read `config.policy` for any online command.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: ClassVar[str] = ""
    """Name of the command; set for commands that train."""
    positional: ClassVar[str | None] = None
    """Setting that may be passed without a flag: the first argument, or for a list all of them."""
    arguments: ClassVar[str] = ""
    """Name of the first arguments in the usage line, unless it is that of the positional setting."""
    unsupported: ClassVar[frozenset[str]] = frozenset()
    example: ClassVar[str] = ""
    """Arguments of a typical call. If the command has many flags, `--help` shows this call with its flags."""

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on the given settings."""
        return {}

    @classmethod
    def group_class(cls, group: str) -> type[SettingsGroup]:
        """Return a group's class."""
        annotation = cls.model_fields[group].annotation
        # Asserted, because the command line is built from these annotations.
        assert isinstance(annotation, type)
        assert issubclass(annotation, SettingsGroup)
        return annotation

    @classmethod
    @cache
    def supported(cls, group: str) -> tuple[str, ...]:
        """Return the supported settings of a group, in order."""
        unsupported = cls.unsupported_in(group)
        return tuple(name for name in cls.group_class(group).model_fields if name not in unsupported)

    @classmethod
    @cache
    def unsupported_in(cls, group: str) -> frozenset[str]:
        """Return the unsupported settings of a group, which a dump omits."""
        names = cls.group_class(group).model_fields
        return frozenset(name for name in names if not {group, f"{group}.{name}"}.isdisjoint(cls.unsupported))

    @model_validator(mode="after")
    def _conditions_hold(self) -> Self:
        for _, group in self:
            group.check_conditions(self)
        return self

    def setting(self, name: str) -> Any:
        """Return a setting of any group; None if it is not set, or the command has none."""
        # A setting of an unsupported group has its default, None, and hides none of the same name.
        values = (vars(getattr(self, group))[name] for group in self._groups_with(name))
        return next((value for value in values if value is not None), None)

    @classmethod
    @cache
    def _groups_with(cls, name: str) -> tuple[str, ...]:
        """Return the groups with a setting of this name. A plan reads hundreds of thousands of settings."""
        return tuple(group for group in cls.model_fields if name in cls.group_class(group).model_fields)

    def changed(self, *names: str) -> str | None:
        """Return the first of these settings with a non-default value, in any group."""
        groups = [group for _, group in self]
        known = (name for name in names for group in groups if name in type(group).model_fields and group.changed(name))
        return next(known, None)

    def updated(self, values: Mapping[str, object]) -> Self:
        """Return the settings with other values of supported settings, by name."""
        groups = {
            group: settings.model_copy(update={name: values[name] for name in self.supported(group) if name in values})
            for group, settings in self
        }
        return self.model_copy(update=groups)

    def settings_of_code(self, setting: str) -> SettingsGroup | None:
        """Return the settings group of the user code that `setting` names; None if it has none."""
        return getattr(self, group_of_code(setting), None)


def default_settings(config: CommandConfig) -> dict[str, object]:
    """Return each setting's default by name, as JSON values. Required settings have none.

    If two settings share a name, the supported one counts.
    """
    groups = type(config).model_fields
    names = [(group, name) for group in groups for name in config.unsupported_in(group)]
    # Supported settings come last, so that they replace unsupported ones of the same name.
    names += [(group, name) for group in groups for name in config.supported(group)]
    fields = {name: config.group_class(group).model_fields[name] for group, name in names}
    return {
        name: to_jsonable_python(field.get_default(call_default_factory=True))
        for name, field in fields.items()
        if not field.is_required()
    }
