"""Settings declared once: every field of a config class becomes a flag, a YAML key and an attribute of the same name.

A config is one level of groups (`config.batch.seed`); flags and keys are the bare field names (`--seed 1`, `seed: 1`).
A flag beats `--config file.yaml`, which beats the default written in the class. Values from all three places go through
the same pydantic validation, so Typer only collects text here. Leaves out the look of help pages (help_page.py) and
what happens to errors (cli.py).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import GenericAlias, NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from rlhf_cli.errors import UsageError
from rlhf_cli.help_page import HelpPageCommand

C = TypeVar("C", bound=BaseModel)

RESERVED = {"config", "local_rank", "help"}  # flags every command has besides its settings


class Flag(NamedTuple):
    """One setting: field `name` of group `group`."""

    name: str
    group: str
    panel: str
    annotation: Any  # without None; `optional` tells whether None is allowed
    optional: bool
    limits: tuple[Any, ...]  # annotated_types of the field: Gt, Ge, Lt, Le
    default: Any  # PydanticUndefined when the setting is required
    help: str

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined

    @property
    def takes(self) -> int:
        """Values the flag takes on the command line."""
        return 0 if self.annotation is bool else len(get_args(self.annotation)) if self._is(tuple) else 1

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.annotation) if self._is(Literal) else ()

    @property
    def is_list(self) -> bool:
        return self._is(list)

    def _is(self, origin: Any) -> bool:
        return get_origin(self.annotation) is origin


def config_class(run: Callable[..., Any]) -> type[BaseModel]:
    """The config class that a command function `run(config: XConfig)` asks for."""
    cls = get_type_hints(run)["config"]
    assert issubclass(cls, BaseModel)
    return cls


def flags_of(config_cls: type[BaseModel]) -> dict[str, Flag]:
    """Every flag of a config class by name, in declaration order.

    Raises:
        TypeError: two groups declare the same name, or a name that every command already has.
    """
    flags: dict[str, Flag] = {}
    for group, outer in config_cls.model_fields.items():
        group_cls = outer.annotation
        assert isinstance(group_cls, type)
        assert issubclass(group_cls, BaseModel)
        for name, field in group_cls.model_fields.items():
            if name in flags or name in RESERVED:
                other = f"in {flags[name].group}" if name in flags else "of every command"
                raise TypeError(f"{config_cls.__name__}: --{name} of {group} is already a flag {other}")
            members = [member for member in get_args(field.annotation) if member is not NoneType]
            optional = NoneType in get_args(field.annotation)
            flags[name] = Flag(
                name=name,
                group=group,
                panel=(group_cls.__doc__ or group).splitlines()[0].rstrip("."),
                annotation=members[0] if optional else field.annotation,
                optional=optional,
                limits=tuple(field.metadata),
                default=field.default if outer.is_required() else getattr(outer.default, name),
                help=(field.description or "").replace("\n", " "),
            )
    return flags


def build_config(config_cls: type[C], values: Mapping[str, Any], *, spelled: str = "--{}") -> C:
    """The validated config of flat values, as text or typed; what is not given keeps its default.

    `spelled` is how a setting is named in messages, `{}` standing for its name.

    Raises:
        UsageError: one line with everything that is wrong.
    """
    flags = flags_of(config_cls)
    problems = [_unknown_key(name, flags, spelled) for name in values if name not in flags]
    config, found = _validate(config_cls, values, dict.fromkeys(values, spelled))
    if config is None or problems:
        raise UsageError("; ".join(problems + found))
    return config


def from_yaml(config_cls: type[C], path: Path) -> C:
    """The config that a YAML file of flat settings describes. Raises UsageError."""
    return build_config(config_cls, read_yaml(path), spelled=f"{{}} in {path}")


def to_yaml(config: BaseModel) -> str:
    """All settings as flat YAML, a comment above each group; `--config` reads it back to the same config."""
    parts = []
    for group, _ in config:
        settings = getattr(config, group)
        body = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=1000)
        parts.append(f"# {(settings.__doc__ or group).splitlines()[0].rstrip('.')}\n{body}")
    return "\n".join(parts)


def from_config(run: Callable[[Any], None]) -> Callable[..., None]:
    """A Typer command function with one option for each setting of `run`'s config class, calling `run(config)`.

    Unknown words are expected in `ctx.args` (see `typer_command`), so that all mistakes are told at once.
    """
    config_cls = config_class(run)
    flags = flags_of(config_cls)

    def command(ctx: typer.Context, config: Path | None, **given: Any) -> None:
        given.pop("local_rank")
        run(_resolve(config_cls, flags, config=config, given=given, stray=ctx.args))

    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters.append(_parameter("config", Path | None, typer.Option("--config", help="YAML file with settings.")))
    # The deepspeed launcher passes --local_rank; it sets LOCAL_RANK as well, which is what is read.
    parameters.append(_parameter("local_rank", int | None, typer.Option("--local_rank", hidden=True)))
    groups = list(config_cls.model_fields)
    shown_first = sorted(flags.values(), key=lambda flag: (groups.index(flag.group), not flag.required))
    parameters.extend(map(_option, shown_first))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


class SettingsCommand(HelpPageCommand):
    """A command whose flags may each be given once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            if twice := next((option for number, option in enumerate(order) if option in order[:number]), None):
                raise UsageError(f"{twice.opts[0]} is given more than once")
        return super().parse_args(ctx, args)


def typer_command(name: str, run: Callable[[Any], None]) -> Any:
    """The Typer command called `name` that resolves the settings of `run` and calls it."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # Unknown flags are collected instead of stopping at the first, so that all mistakes are told at once.
    settings = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "token_normalize_func": underscores,
    }
    app.command(name, cls=SettingsCommand, context_settings=settings)(from_config(run))
    return typer.main.get_command(app)


def underscores(word: str) -> str:
    """The word with hyphens read as underscores: flags may be written either way."""
    return word.replace("-", "_")


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises UsageError naming file and line."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise UsageError(f"--config {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path}: not a text file in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"--config {path}{where}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: must be lines of `setting: value`, not a {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key written twice is an error instead of the last one winning."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given more than once", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _resolve(
    config_cls: type[BaseModel],
    flags: Mapping[str, Flag],
    *,
    config: Path | None,
    given: Mapping[str, Any],
    stray: Sequence[str],
) -> BaseModel:
    typed = {name: value for name, value in given.items() if value is not None}
    written = {} if config is None else read_yaml(config)
    spelled = dict.fromkeys(written, f"{{}} in {config}") | dict.fromkeys(typed, "--{}")
    swallowed = _swallowed_flags(typed, flags)
    problems = swallowed or _stray_arguments(stray, flags)
    problems += [_unknown_key(name, flags, spelled[name], written[name]) for name in written if name not in flags]
    resolved, found = _validate(config_cls, {**written, **typed}, spelled)
    if resolved is None or problems:
        raise UsageError("; ".join(problems or found) if swallowed else "; ".join(problems + found))
    return resolved


def _validate(config_cls: type[C], values: Mapping[str, Any], spelled: Mapping[str, str]) -> tuple[C | None, list[str]]:
    """The config, or None and what is wrong with the values. Names that are no settings are left out."""
    flags = flags_of(config_cls)
    groups: dict[str, dict[str, Any]] = {}
    for group, outer in config_cls.model_fields.items():
        groups[group] = (
            {} if outer.is_required() else {n: getattr(outer.default, n) for n in outer.default.model_fields_set}
        )
    for name, value in values.items():
        if name in flags:
            groups[flags[name].group][name] = _prepare(value, flags[name])
    try:
        return config_cls(**groups), []
    except ValidationError as error:
        return None, _messages(error.errors(), flags, values, spelled)


def _prepare(value: Any, flag: Flag) -> Any:
    """A value as the command line or YAML gives it, in the form pydantic converts to the field's type."""
    if flag.optional and isinstance(value, str) and value == "null":
        return None
    if flag.is_list and isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if flag.choices:
        return next((choice for choice in flag.choices if str(choice) == str(value)), value)
    if isinstance(value, bool) and flag.annotation in (int, float):
        return str(value).lower()  # else pydantic takes true for 1
    return value


def _messages(
    errors: Sequence[ErrorDetails], flags: Mapping[str, Flag], values: Mapping[str, Any], spelled: Mapping[str, str]
) -> list[str]:
    """One phrase for each wrong setting, however many errors pydantic found in it."""
    missing, phrases = [], {}
    for error in errors:
        name = str(error["loc"][1]) if len(error["loc"]) > 1 else ""
        own_words = str(error.get("ctx", {}).get("error", error["msg"]))
        if error["type"] == "missing" and len(error["loc"]) == 2:
            missing.append(f"--{name}")
        elif not name:
            phrases[own_words] = own_words
        else:
            right = (
                own_words if error["type"] in ("value_error", "assertion_error") else f"must be {expected(flags[name])}"
            )
            phrases[name] = f"{spelled.get(name, '--{}').format(name)} {_shown(values.get(name))}: {right}"
    return ([f"missing {', '.join(missing)}"] if missing else []) + list(phrases.values())


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(_shown, value)) or "[]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "''" if value == "" else str(value)


def _unknown_key(name: str, flags: Mapping[str, Flag], spelled: str, value: Any = None) -> str:
    written = spelled.format(name)
    if isinstance(value, dict) and name in {flag.group for flag in flags.values()}:
        return f"unknown setting {written}: settings are flat, write what is in it at the top level"
    return f"unknown setting {written}{_did_you_mean(name, flags, '')}"


def _did_you_mean(word: str, flags: Mapping[str, Flag], prefix: str) -> str:
    known = list(flags)
    if prefix:
        known += [f"no_{flag.name}" for flag in flags.values() if flag.annotation is bool] + ["config", "help"]
    if near := get_close_matches(underscores(word), known, n=1):
        return f" (did you mean {prefix}{near[0]}?)"
    return ""


def _stray_arguments(stray: Sequence[str], flags: Mapping[str, Flag]) -> list[str]:
    """What to say about words of the command line that belong to no known flag."""
    problems, after_unknown = [], False
    for word in stray:
        if word.startswith("-") and word.strip("-")[:1].isalpha():
            name = word.split("=", 1)[0]
            problems.append(f"unknown flag {name}{_did_you_mean(name.lstrip('-'), flags, '--')}")
            after_unknown = True
        elif not after_unknown:
            on_off = ": a setting is switched on with --NAME and off with --no_NAME"
            hint = on_off if word.lower() in ("true", "false") else ": settings are given as --NAME VALUE"
            problems.append(f"unexpected {word!r}{hint}")
    return problems


def _swallowed_flags(typed: Mapping[str, Any], flags: Mapping[str, Flag]) -> list[str]:
    """Complaints about flags that took the following flag for their value."""
    problems = []
    for name, value in typed.items():
        words = value if isinstance(value, tuple) else (value,)
        for word in words:
            is_text = isinstance(word, str) and word.startswith("--")
            if is_text and underscores(word[2:].split("=", 1)[0]).removeprefix("no_") in flags:
                problems.append(f"--{name} needs {expected(flags[name])}, but {word} follows")
    return problems


def _option(flag: Flag) -> inspect.Parameter:
    """The Typer option of a flag: plain text, or a switch; validation comes later, for YAML and flags alike."""
    spelling = f"--{flag.name}"
    annotation: Any = str
    if flag.takes == 0:
        spelling, annotation = f"{spelling}/--no_{flag.name}", bool
    elif flag.takes > 1:
        annotation = GenericAlias(tuple, (str,) * flag.takes)
    choices = [str(choice) for choice in flag.choices]
    option = typer.Option(
        spelling,
        help=f"{flag.help} ({describe(flag)})",
        rich_help_panel=flag.panel,
        show_default=False,
        autocompletion=(lambda: choices) if choices else None,
    )
    return _parameter(flag.name, annotation | None, option)


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[annotation, option])


def describe(flag: Flag) -> str:
    """What a flag takes and what it is without being given, as help pages show it."""
    if flag.takes == 0:
        return f"on by default; --no_{flag.name} turns it off" if flag.default else "off by default"
    if flag.required:
        return f"{expected(flag)}; required"
    if flag.default is None or flag.default == []:
        return expected(flag)
    default = ",".join(map(str, flag.default)) if flag.is_list else _shown(flag.default)
    return f"{expected(flag)}; default {default}"


def expected(flag: Flag) -> str:
    """What a value of this flag must be, in words: 'an integer > 0', 'bf16 or fp32', '2 numbers'."""
    if flag.choices:
        *most, last = map(str, flag.choices)
        return f"{', '.join(most)} or {last}" if most else last
    if flag.takes > 1:
        return f"{flag.takes} {_TYPE_NAMES[get_args(flag.annotation)[0]][1]}"
    if flag.is_list:
        return f"{_TYPE_NAMES[get_args(flag.annotation)[0]][1]} separated by commas"
    name = _TYPE_NAMES[flag.annotation][0]
    bounds = _bounds(flag.limits)
    return f"{name} {bounds}" if bounds else name


_TYPE_NAMES: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "words"),
    bool: ("true or false", "true or false"),
    Path: ("a path", "paths"),
}


def _bounds(limits: Sequence[Any]) -> str:
    found = {
        kind: getattr(limit, kind) for limit in limits for kind in ("gt", "ge", "lt", "le") if hasattr(limit, kind)
    }
    if found.keys() == {"ge", "le"}:
        return f"from {found['ge']} to {found['le']}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(f"{signs[kind]} {bound}" for kind, bound in found.items())
