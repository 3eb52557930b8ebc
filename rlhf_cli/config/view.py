"""Settings of `rlhf view`."""

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup


class ViewGroup(SettingsGroup):
    """View"""

    runs: list[str] = Field(min_length=1)
    """Run directories, or folders that contain run directories."""
    port: int = Field(0, ge=0, le=65_535)
    """Port on 127.0.0.1; 0 selects a free port. Set it to forward the port from another machine."""
