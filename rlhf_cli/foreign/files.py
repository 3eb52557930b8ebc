"""The settings of all YAML files of a call as one; foreign words are replaced before later files win."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_cli.foreign.translation import translate_settings
from rlhf_cli.settings_file import SettingsFile


@dataclass(slots=True)
class WrittenSettings:
    """The values by name, with the form of each name in messages: `{}` for the name, and the file it is in."""

    values: dict[str, object] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def written_settings(
    files: Sequence[SettingsFile], *, command: str, known: Mapping[str, int], typed: Mapping[str, object]
) -> WrittenSettings:
    """Return the settings of the files, of which later ones win.

    Args:
        known: flags of the command itself, each with the number of values that it takes.
        typed: settings that the command line gives.
    """
    found = WrittenSettings()
    for file in files:
        beside = {name: value for other in files if other is not file for name, value in other.values.items()}
        own, lines = translate_settings(file.values, command=command, known=known, beside=beside, typed=typed)
        found.values |= own
        found.spelled |= dict.fromkeys(own, f"{{}} in {file.path}")
        found.notes += [note for note in lines.notes if note not in found.notes]
        found.problems += [f"{problem} (in {file.path})" for problem in lines.problems]
    return found
