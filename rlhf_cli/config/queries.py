"""Parameters after a name in a setting, as in `NAME?PARAMETER=VALUE&...`."""

import json
from collections.abc import Mapping
from urllib.parse import unquote

from rlhf_cli.errors import UsageError, did_you_mean

TEXTARENA_PREFIX = "textarena:"
"""Prefix of an environment that is a game of the package textarena."""
HARBOR_PREFIX = "harbor:"
"""Prefix of prompts that are task folders of Harbor, and of the environment that runs them."""

VERIFIERS_PREFIX = "verifiers:"
"""Prefix for environments from the verifiers package, and for prompts from the same package."""


def parameters_of(name: str, query: str, defaults: Mapping[str, object]) -> dict[str, object]:
    """Return the values by parameter, in the types of the defaults.

    A parameter whose default is a list or tuple may be given several times.

    Args:
        name: what the parameters belong to, for messages.
        query: the text after the question mark.
        defaults: default value by parameter; a default of None accepts any value.

    Raises:
        UsageError: there is no such parameter, it is given twice, or its value has another type.
    """
    written: dict[str, list[str]] = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        written.setdefault(key, []).append(unquote(value))
    if unknown := [key for key in written if key not in defaults]:
        near = did_you_mean(unknown[0], defaults)
        raise UsageError(f"{name} has no parameter {unknown[0]!r}{near}: {', '.join(defaults)}")
    return {key: _value(key, defaults[key], values) for key, values in written.items()}


def _value(name: str, default: object, written: list[str]) -> object:
    values = [_read(text) for text in written]
    if isinstance(default, list | tuple):
        return type(default)(values)
    if len(values) > 1:
        raise UsageError(f"{name} is given twice")
    kinds: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
    if isinstance(default, str):
        return written[0]
    # A Boolean is an integer too.
    wanted = kinds.get(type(default), (object,))
    if not isinstance(values[0], wanted) or (isinstance(values[0], bool) and bool not in (*wanted, type(default))):
        raise UsageError(f"{name} must be {_NOUNS[type(default)]}, not {written[0]!r}")
    return values[0]


_NOUNS = {bool: "true or false", int: "an integer", float: "a number"}


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
