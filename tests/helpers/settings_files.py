"""Settings files as the commands read them."""

from pathlib import Path
from typing import TypeVar

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.options import build_config
from rlhf_cli.settings_file import read_settings

ConfigT = TypeVar("ConfigT", bound=CommandConfig)


def from_yaml(config_cls: type[ConfigT], path: Path) -> ConfigT:
    """Load a config from a YAML file and the files that it extends."""
    values = {name: value for file in read_settings(str(path)) for name, value in file.values.items()}
    return build_config(config_cls, values, spelled=f"{{}} in {path}")
