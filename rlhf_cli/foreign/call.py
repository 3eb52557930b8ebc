"""Types for translation functions: the command line with a foreign flag, and the result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class Refused(ValueError):
    """A foreign flag without an equivalent. The message names the reason or the replacement."""


@dataclass(frozen=True, slots=True)
class Call:
    """The command line that contains a foreign flag.

    - `values`: values by flag.
    - `notes`: remarks to print once.
    """

    command: str
    values: Mapping[str, list[str]]
    notes: list[str] = field(default_factory=list)

    def value(self, *names: str) -> str | None:
        """Return the first value given for any of these flags, in this order."""
        return next((self.values[name][0] for name in names if self.values.get(name)), None)

    def is_on(self, *names: str) -> bool:
        """Return whether any switch is enabled."""
        return any(self.values[name] == [] or is_true(self.values[name][0]) for name in names if name in self.values)

    def whole(self, *names: str, default: int | None = None) -> int:
        """Return the first value given for any of these flags as an integer.

        Raises:
            Refused: it is not an integer, or not given without a default.
        """
        text = self.value(*names)
        return default if text is None and default is not None else integer(text or "", names[0])

    def note(self, text: str) -> None:
        """Add a remark."""
        if text not in self.notes:
            self.notes.append(text)


Settings = dict[str, list[str]]
"""`rlhf` settings: values by name; an empty list for a switch."""
Meaning = Callable[[list[str], Call], Settings | None]
"""Translates a foreign flag's values to settings, or to None if the flag is not needed."""


def is_true(text: str) -> bool:
    """Return whether a value enables a switch."""
    return text.lower() in ("true", "1", "yes", "on")


def integer(text: str, name: str) -> int:
    """Return a number written as an integer, as `8`, `8.0` or `1e3`. Raises Refused for other texts."""
    try:
        number = float(text)
    except ValueError:
        raise Refused(f"requires --{name} as a number, not {text!r}") from None
    if not number.is_integer():
        raise Refused(f"requires --{name} as an integer, not {text}")
    return int(number)
