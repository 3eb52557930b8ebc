"""Settings that user code declares, which become flags of the command that names the code."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from pydantic import create_model

from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.config.plugins import Target, absolute, group_of_code, is_target, loaded
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import RESERVED, Flag, flags_of
from rlhf_cli.settings_file import read_settings

_C = TypeVar("_C", bound=CommandConfig)


def with_settings_of_code(config_cls: type[_C], values: Mapping[str, object]) -> type[_C]:
    """Return the config class extended by one settings group for each user-defined plugin that declares settings.

    Example: `--advantage_estimator median.py:quantile` with `quantile = Estimator(..., settings=QuantileConfig)` adds
    the group `advantage_estimator_settings: QuantileConfig`; `--quantile` becomes a flag, a YAML key and a setting in
    config.yaml.

    Raises:
        UsageError: the code cannot be loaded, or its settings cannot be flags of this command.
    """
    flags, added = flags_of(config_cls), dict[str, tuple[type[SettingsGroup], SettingsGroup]]()
    for target in code_with_settings(flags, values):
        group = getattr(loaded(target), "settings", None)
        if group is None:
            continue
        name, text = target.setting, values[target.setting]
        for own, field in group.model_fields.items():
            if own in flags or own in RESERVED:
                raise UsageError(f"--{name} {text}: its setting {own} is already a flag of this command")
            if field.is_required():
                raise UsageError(f"--{name} {text}: its setting {own} needs a default")
        added[group_of_code(name)] = (group, group())
    return create_model(config_cls.__name__, __base__=config_cls, **added) if added else config_cls  # type: ignore[call-overload, no-any-return]


def code_with_settings(flags: Mapping[str, Flag], values: Mapping[str, object]) -> Iterator[Target]:
    """Yield the user code that may declare settings."""
    for name, flag in flags.items():
        text = values.get(name)
        if flag.plugin and flag.plugin.may_have_settings and isinstance(text, str) and is_target(text):
            yield Target(name, flag.plugin, absolute(text))


def given_early(arguments: Sequence[str], names: Collection[str]) -> dict[str, object]:
    """Read the values of a few settings from arguments and `--config` files before the other flags are known."""
    found: dict[str, object] = {}
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        flag, is_joined, value = argument.partition("=")
        name = underscores(flag.removeprefix("--"))
        if flag.startswith("--") and name in {*names, "config"}:
            found[name] = value if is_joined else following
    try:
        files = read_settings(str(found.pop("config"))) if "config" in found else []
    except UsageError:
        files = []  # the full parse reports it with the other mistakes
    return {name: value for file in files for name, value in file.values.items() if name in names} | found


def underscores(word: str) -> str:
    """Replace hyphens by underscores, since flags may be written either way."""
    return word.replace("-", "_")
