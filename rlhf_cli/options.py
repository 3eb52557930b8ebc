"""Builds configs from flags and YAML. Each config class field becomes a flag and a YAML key with the same name.

A config has one level of groups (`config.batch.seed`); flags and keys are bare field names (`--seed 1`, `seed: 1`).
Precedence, highest first:

1. flags,
2. `--config a.yaml,b.yaml`, later files first,
3. the class method `implied`, with defaults derived from other settings,
4. defaults in the class.

All values go through the same pydantic validation; Typer only collects text. help_page.py formats help, and cli.py
reports errors.
"""

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, TypeVar

import typer
import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlhf_cli.code_settings import code_with_settings, given_early, underscores, with_settings_of_code
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plugins import records_of, require_plugins
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import Flag, describe, expected, flags_of, shown
from rlhf_cli.foreign.files import WrittenSettings, written_settings
from rlhf_cli.foreign.translation import Translation, translate
from rlhf_cli.help_page import HelpPageCommand
from rlhf_cli.settings_file import read_settings

_C = TypeVar("_C", bound=CommandConfig)

# List items. A comma inside parentheses does not separate items: `math,cosine(max_len=2048, wrong_long=0)`.
_BETWEEN_COMMAS = re.compile(r"(?:\([^()]*\)|[^,])+")

_LIKENESS = 0.75
"""Minimum difflib ratio for "did you mean" hints. Below it, most hints were wrong."""

_FLAGS = "[--FLAG VALUE]..."
"""Usage text after the command name in help pages."""


def build_config(config_cls: type[_C], values: Mapping[str, object], *, spelled: str = "--{}") -> _C:
    """Build and validate a config from flat values, as text or typed. Missing settings keep the defaults.

    `spelled` formats setting names in messages, with `{}` for the name.

    Raises:
        UsageError: one line that lists all problems.
    """
    config_cls = with_settings_of_code(config_cls, values)
    flags = flags_of(config_cls)
    problems = [_unknown_key(name, flags, spelled) for name in values if name not in flags]
    config, invalid = _validate(config_cls, values, dict.fromkeys(values, spelled))
    if config is None or problems:
        raise UsageError("; ".join(problems + invalid))
    return config


def to_yaml(config: CommandConfig) -> str:
    """Format all settings as flat YAML with a comment above each group. `--config` reads it back unchanged."""
    parts = []
    for group, settings in config:
        values = settings.model_dump(mode="json", by_alias=True, include=set(config.supported(group)))
        if values:
            body = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
            parts.append(f"# {(settings.__doc__ or group).splitlines()[0].rstrip('.')}\n{body}")
    return "\n".join(parts)


_CONFIG_OPTION = typer.Option("--config", help="YAML settings files, separated by commas. Later files take precedence.")


def _from_config(
    name: str, config_cls: type[CommandConfig], run: Callable[..., None], text: str | None
) -> Callable[..., None]:
    """Return a Typer command function with one option per setting of a config class. It calls `run(config)`.

    `ctx.args` holds unknown arguments (see `typer_command`), so that one message reports all mistakes. The config
    class's `positional` setting may be passed without a flag.
    """
    flags = flags_of(config_cls)

    def command(ctx: typer.Context, config: Path | None, **given: object) -> None:
        named = {flag.name: given[flag.attribute] for flag in flags.values()}
        words = ctx.meta.get(_TRANSLATED) or Translation()
        known = {flag.name: flag.takes for flag in flags.values()}
        read = [] if config is None else read_settings(str(config))
        named |= dict.fromkeys(words.automatic, "auto")
        typed = {name: value for name, value in named.items() if value is not None}
        written = written_settings(read, command=ctx.command.name or "", known=known, typed=typed)
        resolved = _resolve(
            config_cls,
            flags,
            written=written,
            given=named,
            stray=ctx.args,
            behind=ctx.meta.get(_BEHIND, []),
            problems=[*words.problems, *written.problems],
        )
        _print_notes(ctx.command.name, [*words.notes, *written.notes])
        require_plugins(resolved)
        run(resolved)

    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters.append(_parameter("config", Path | None, _CONFIG_OPTION))
    # The DeepSpeed launcher passes --local_rank, but also sets LOCAL_RANK, which is the one that is read.
    parameters.append(_parameter("local_rank", int | None, typer.Option("--local_rank", hidden=True)))
    groups = list(config_cls.model_fields)
    shown_first = sorted(flags.values(), key=lambda flag: (groups.index(flag.group), not flag.required))
    parameters.extend(map(_option, shown_first))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # Typer reads annotations before the signature.
    command.__annotations__ = {}
    command.__name__, command.__doc__ = name, text
    return command


_TRANSLATED = "rlhf_cli.translated"
"""Key in the Click context for the translation from other frameworks' flags."""


_BEHIND = "rlhf_cli.behind"
"""Key in the Click context for the arguments after `--`."""


class SettingsCommand(HelpPageCommand):
    """A command that rejects repeated flags and translates other frameworks' flags."""

    def _known(self, ctx: Any) -> dict[str, int]:
        """Return the command's flags, each with the number of values."""
        options = [parameter for parameter in self.get_params(ctx) if hasattr(parameter, "is_flag")]
        return {
            name.removeprefix("--"): 0 if option.is_flag else option.nargs for option in options for name in option.opts
        }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Words after -- are the positional setting as they are, even if they begin with dashes.
        if "--" in args:
            place = args.index("--")
            args, ctx.meta[_BEHIND] = args[:place], args[place + 1 :]
        if not ctx.resilient_parsing:
            done = translate(args, command=self.name or "", known=self._known(ctx))
            args, ctx.meta[_TRANSLATED] = done.words, done
            # Click lets the last of two equal flags win. The parser also returns every option in order.
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            if twice := next((option for number, option in enumerate(order) if option in order[:number]), None):
                raise UsageError(f"{twice.opts[0]} is given more than once")
        return super().parse_args(ctx, args)


def typer_command(
    name: str,
    config_cls: type[CommandConfig],
    run: Callable[..., None],
    arguments: Sequence[str] = (),
    *,
    text: str | None = None,
) -> Any:
    """Return a Typer command `name` that builds a config of the class and calls `run` with it.

    Code named in `arguments` may add settings. The help text is `text`, by default the docstring of the class.
    """
    text = text or config_cls.__doc__
    names = {flag.name for flag in flags_of(config_cls).values() if flag.plugin and flag.plugin.may_have_settings}
    # Before Typer parses: the flags of the command depend on the code that the arguments name.
    config_cls = with_settings_of_code(config_cls, given_early(arguments, names))
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # Collect unknown flags instead of stopping at the first one, so that one message reports all mistakes.
    settings = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "token_normalize_func": underscores,
    }
    first = config_cls.arguments or (config_cls.positional or "").upper()
    usage = f"{first} {_FLAGS}" if first else _FLAGS
    command = _from_config(name, config_cls, run, text)
    app.command(name, cls=SettingsCommand, context_settings=settings, options_metavar=usage)(command)
    built: Any = typer.main.get_command(app)
    built.example = config_cls.example
    groups = {flag.panel: config_cls.group_class(flag.group) for flag in flags_of(config_cls).values()}
    built.outside = {panel for panel, group in groups.items() if group.__module__.split(".")[0] != __package__}
    return built


def _resolve(
    config_cls: type[CommandConfig],
    flags: Mapping[str, Flag],
    *,
    written: WrittenSettings,
    given: Mapping[str, object],
    stray: Sequence[str],
    behind: Sequence[str],
    problems: list[str],
) -> CommandConfig:
    typed = {name: value for name, value in given.items() if value is not None}
    positional = config_cls.positional
    if positional and behind and flags[positional].is_list:
        typed[positional] = list(behind)
    else:
        stray = [*stray, *behind]
    if positional and positional not in typed and stray and not stray[0].startswith("-"):
        if flags[positional].is_list:
            items = list(takewhile(lambda word: not word.startswith("-"), stray))
            typed[positional], stray = items, stray[len(items) :]
        else:
            typed[positional], *stray = stray
    values = {**written.values, **typed}
    spelled = {**written.spelled, **dict.fromkeys(typed, "--{}")}
    # If a flag consumed the next flag as its value, other problems are consequences: report only this.
    swallowed = _swallowed_flags(typed, flags)
    problems = swallowed or [*problems, *_stray_arguments(stray, flags, values)]
    problems += [_unknown_key(name, flags, spelled[name], values[name]) for name in written.values if name not in flags]
    problems += _unreadable_texts(values, spelled)
    resolved, invalid = _validate(config_cls, values, spelled)
    if resolved is None or problems:
        raise UsageError("; ".join(problems or invalid) if swallowed else "; ".join(problems + invalid))
    return resolved


def _print_notes(command: str | None, notes: Sequence[str]) -> None:
    """Print notes about translated flags, once per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for note in notes:
            print(f"rlhf {command}: {note}", file=sys.stderr, flush=True)


def _unreadable_texts(values: Mapping[str, object], spelled: Mapping[str, str]) -> list[str]:
    """Report values that are not valid UTF-8, and home folders of unknown users."""
    problems = []
    for name, value in values.items():
        shown_as = spelled[name].replace("{}", name)
        # Python decodes invalid bytes on the command line to surrogates.
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            problems.append(f"{shown_as}: not valid UTF-8")
        elif isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:
            problems.append(f"{shown_as} {value}: no such user")
    return problems


def _validate(
    config_cls: type[_C], values: Mapping[str, object], spelled: Mapping[str, str]
) -> tuple[_C | None, list[str]]:
    """Return the config, or None and the problems. Unknown names are ignored."""
    flags = flags_of(config_cls)
    groups: dict[str, dict[str, object]] = {}
    own_defaults: dict[str, set[str]] = {}
    # Groups without flags keep the command's default.
    for group in dict.fromkeys(flag.group for flag in flags.values()):
        outer = config_cls.model_fields[group]
        set_by_command = () if outer.is_required() else outer.default.model_fields_set
        groups[group] = {name: getattr(outer.default, name) for name in set_by_command}
        own_defaults[group] = {name for name in set_by_command if name not in values}
    for name, value in config_cls.implied(values).items():
        if name in flags:
            groups[flags[name].group][name] = value
    for name, value in values.items():
        if name in flags:
            groups[flags[name].group][name] = _prepare(value, flags[name])
    try:
        config = config_cls(**groups)
    except ValidationError as error:
        return None, _messages(error.errors(), flags, values, spelled)
    for group, settings in config:
        # So that `model_fields_set` tells given settings from the command's defaults.
        settings.model_fields_set.difference_update(own_defaults.get(group, set()))
    endless = [name for name in values if name in flags and not _finite(config, flags[name])]
    if endless:
        return None, [_must_be(flags[name], values[name], spelled[name]) for name in endless]
    return config, []


def _prepare(value: object, flag: Flag) -> object:
    """Convert a value from the command line or YAML to a form that pydantic accepts for the field."""
    if flag.optional and (value == "null" or (value == "auto" and flag.annotation is bool)):
        return None
    if flag.is_list and isinstance(value, str):
        return [item.strip() for item in _BETWEEN_COMMAS.findall(value)]
    if flag.choices:
        return next((choice for choice in flag.choices if str(choice) == str(value)), value)
    if isinstance(value, bool) and flag.annotation in (int, float):
        # Otherwise pydantic accepts `true` as 1.
        return str(value).lower()
    return value


def _messages(
    errors: Sequence[ErrorDetails], flags: Mapping[str, Flag], values: Mapping[str, object], spelled: Mapping[str, str]
) -> list[str]:
    """Return one phrase per invalid setting, even if pydantic reports several errors for it."""
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
            phrases[name] = f"{spelled.get(name, '--{}').replace('{}', name)} {shown(values.get(name))}: {right}"
    return ([f"missing {', '.join(missing)}"] if missing else []) + list(phrases.values())


def _must_be(flag: Flag, value: object, spelled: str) -> str:
    return f"{spelled.replace('{}', flag.name)} {shown(value)}: must be {expected(flag)}"


def _finite(config: CommandConfig, flag: Flag) -> bool:
    """Return False for infinite and NaN values, which no setting supports."""
    value = getattr(getattr(config, flag.group), flag.attribute)
    numbers = value if isinstance(value, tuple | list) else [value]
    return all(math.isfinite(number) for number in numbers if isinstance(number, float))


def _unknown_key(name: str, flags: Mapping[str, Flag], spelled: str, value: object = None) -> str:
    written = spelled.replace("{}", name)
    if isinstance(value, dict) and name in {flag.group for flag in flags.values()}:
        return f"unknown setting {written}: settings are flat, move its keys to the top level"
    return f"unknown setting {written}{_did_you_mean(name, flags, '')}"


def _did_you_mean(word: str, flags: Mapping[str, Flag], prefix: str) -> str:
    known = list(flags)
    if prefix:
        known += [f"no_{flag.name}" for flag in flags.values() if flag.annotation is bool] + ["config", "help"]
    if near := get_close_matches(underscores(word), known, n=1, cutoff=_LIKENESS):
        return f" (did you mean {prefix}{near[0]}?)"
    return ""


def _stray_arguments(stray: Sequence[str], flags: Mapping[str, Flag], values: Mapping[str, object]) -> list[str]:
    """Report arguments that belong to no known flag."""
    problems, after_unknown = [], False
    # A flag may belong to a record in the user's file, while the setting names another object of the file.
    hints = {
        own: f": it is a setting of {record}, set --{setting} {text.rpartition(':')[0]}:{record}"
        for setting, plugin, text in code_with_settings(flags, values)
        for record, value in records_of(text, plugin).items()
        for own in (value.settings.model_fields if value.settings else ())
    }
    for word in stray:
        if word.startswith("-") and word.strip("-")[:1].isalpha():
            name = word.split("=", 1)[0]
            bare = name.lstrip("-")
            problems.append(f"unknown flag {name}{hints.get(underscores(bare)) or _did_you_mean(bare, flags, '--')}")
            after_unknown = True
        # Arguments after an unknown flag are most likely its values.
        elif not after_unknown:
            on_off = ": switch settings on with --NAME and off with --no_NAME"
            hint = on_off if word.lower() in ("true", "false") else ": pass settings as --NAME VALUE"
            problems.append(f"unexpected {word!r}{hint}")
    return problems


def _swallowed_flags(typed: Mapping[str, object], flags: Mapping[str, Flag]) -> list[str]:
    """Report flags that consumed the next flag as their value."""
    problems = []
    for name, value in typed.items():
        words = value if isinstance(value, tuple) else (value,)
        for word in words:
            is_text = isinstance(word, str) and word.startswith("--")
            if is_text and underscores(word[2:].split("=", 1)[0]).removeprefix("no_") in flags:
                problems.append(f"--{name} requires {expected(flags[name])}, but {word} follows")
    return problems


def _option(flag: Flag) -> inspect.Parameter:
    """Return the Typer option for a flag: plain text or a switch. Validation comes later, the same as for YAML."""
    spelling = f"--{flag.name}"
    annotation: type | GenericAlias = str
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
    return _parameter(flag.attribute, annotation | None, option)


def _parameter(name: str, annotation: object, option: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[annotation, option])
