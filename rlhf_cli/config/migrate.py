"""Settings of `rlhf migrate`."""

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup


class MigrateGroup(SettingsGroup):
    """Migrate"""

    source: list[str]
    """Shell script, YAML or TOML files of OpenRLHF, TRL, verl, EasyR1 or prime-rl; or after --, a command line."""
    as_yaml: bool = Field(False, alias="yaml")
    """Print the settings as YAML for --config instead of a command."""
    output: str | None = None
    """Write the settings to this YAML file."""
    num_gpus: int | None = Field(None, gt=0)
    """Number of processes that train in TRL, if the command line does not contain it. Batch sizes depend on it."""
