"""`rlhf runs`: the runs in a folder, with state and progress."""

from pydantic import Field

from rlhf_cli.config.base import CommandConfig, SettingsGroup


class RunsGroup(SettingsGroup):
    """Runs"""

    folder: str = "."
    """Folder to search, with all subfolders."""
    as_json: bool = Field(False, alias="json")
    """Print the runs as a JSON object."""


class RunsConfig(CommandConfig):
    """List the runs in a folder: state, progress, last metrics, and the command that resumes each.

    FOLDER is the current folder by default. The newest run comes first.
    """

    positional = "folder"

    runs: RunsGroup = RunsGroup()
