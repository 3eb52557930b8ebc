"""`rlhf schema`: JSON Schema of a command's settings."""

from typing import Literal

from pydantic import Field

from rlhf_cli.command_table import COMMANDS
from rlhf_cli.config.base import CommandConfig, SettingsGroup


class SchemaGroup(SettingsGroup):
    """Schema"""

    for_: Literal[*COMMANDS] = Field(alias="for")  # type: ignore[valid-type]
    """Command whose settings are described."""


class SchemaConfig(CommandConfig):
    """Print the JSON Schema of a command's settings, for editors that complete and check YAML files, and for programs.

    FOR is the command. In an editor with the YAML language server, start the file with `# yaml-language-server:
    $schema=sft.json`.
    """

    positional = "for"

    schema_of: SchemaGroup
