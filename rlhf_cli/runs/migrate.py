"""`rlhf migrate`: prints the translation of a command, script or config of another framework."""

import sys
from pathlib import Path

from rlhf_cli.commands.migrate import MigrateConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.foreign.migration import as_yaml, migrated
from rlhf_cli.foreign.programs import programs_in


def run_migrate(config: MigrateConfig) -> None:
    """Print the command, or YAML, on stdout and the notes on stderr; or write the YAML to a file."""
    settings = config.migrate
    found = [migrated(program) for program in programs_in(settings.source, num_gpus=settings.num_gpus)]
    is_file = settings.output is not None or settings.as_yaml
    if is_file and len(found) > 1:
        raise UsageError(
            f"{settings.source[0]} has {len(found)} training commands, and YAML is for one: pass one after --"
        )
    if not is_file:
        for place, one in enumerate(found):
            print("\n" * bool(place) + one.command_line())
    text = as_yaml(found[0]) if is_file else ""
    if settings.output is not None:
        try:
            Path(settings.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--output {settings.output}: {(error.strerror or str(error)).lower()}") from None
        found[0].remarks.append(f"rlhf {found[0].program.command} --config {settings.output}")
    elif is_file:
        print(text, end="")
    for one in found:
        for note in one.notes():
            print(f"rlhf migrate: {note}", file=sys.stderr)
