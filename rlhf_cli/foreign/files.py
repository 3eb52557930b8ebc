"""Merges the settings from all YAML files. Foreign settings are translated first, so that later files can override."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_cli.foreign.translation import translate_settings
from rlhf_cli.settings_file import SettingsFile


@dataclass(slots=True)
class WrittenSettings:
    """Merged settings by name. `spelled` formats names in messages: `{}` for the name, plus the file."""

    values: dict[str, object] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def written_settings(
    files: Sequence[SettingsFile], *, command: str, known: Mapping[str, int], typed: Mapping[str, object]
) -> WrittenSettings:
    """Merge settings from files in order of increasing precedence.

    Args:
        known: the command's flags, each with the number of values.
        typed: settings from the command line.
    """
    merged = WrittenSettings()
    for file in files:
        # Flags may combine across files: --prompt_max_len adds to --max_new_tokens, for example.
        beside = {name: value for other in files if other is not file for name, value in other.values.items()}
        own, lines = translate_settings(file.values, command=command, known=known, beside=beside, typed=typed)
        merged.values |= own
        merged.spelled |= dict.fromkeys(own, f"{{}} in {file.path}")
        merged.notes += [note for note in lines.notes if note not in merged.notes]
        merged.problems += [f"{problem} (in {file.path})" for problem in lines.problems]
    return merged
