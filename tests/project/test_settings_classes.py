"""Settings classes stay shallow: a command lists what it lacks instead of a group for each combination."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

import rlhf_cli
from rlhf_cli.config.base import CommandConfig, SettingsGroup

PACKAGE = Path(rlhf_cli.__file__).parent
FOLDERS = ("config", "commands", "algorithms/estimators")
BASES = (SettingsGroup, CommandConfig)
MAY_BE_OVERRIDDEN = {"implied", "estimator"}  # both depend on what a command adds


def settings_classes() -> list[type]:
    """Return all settings classes of the package."""
    for folder in FOLDERS:
        for file in sorted((PACKAGE / folder).rglob("*.py")):
            parts = ("rlhf_cli", *file.relative_to(PACKAGE).with_suffix("").parts)
            import_module(".".join(parts).removesuffix(".__init__"))
    found = dict.fromkeys(cls for base in BASES for cls in below(base))
    return [cls for cls in found if cls.__module__.startswith("rlhf_cli.")]


def below(cls: type) -> Iterator[type]:
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield child
        yield from below(child)


@pytest.mark.parametrize("cls", settings_classes(), ids=lambda cls: cls.__name__)
def test_a_settings_class_is_shallow_and_overrides_no_method(cls):
    bases = [base for base in cls.__mro__[1:] if issubclass(base, BASES)]
    assert len(bases) <= 2, f"bases: {', '.join(base.__name__ for base in bases)}"
    methods = {
        n for n, v in vars(cls).items() if isinstance(v, FunctionType | property | classmethod) and n[:2] != "__"
    }
    overridden = {n for n in methods for base in bases if n in vars(base)} - MAY_BE_OVERRIDDEN
    assert not overridden
