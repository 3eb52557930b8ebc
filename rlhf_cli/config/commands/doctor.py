"""The settings of `rlhf doctor`."""

from pydantic import Field

from rlhf_cli.config.base import CommandConfig, SettingsGroup


class DoctorGroup(SettingsGroup):
    """Doctor"""

    smoke_tests: bool = True
    """Let each part do its work once: attention kernel, DeepSpeed step, rollout engine, weight push, Ray.

    All checks together end within 10 minutes.
    """
    as_json: bool = Field(False, alias="json")
    """Print the findings as one JSON object."""
    report: bool = False
    """Print a block of Markdown for a bug report, without home paths, names and keys."""


class DoctorConfig(CommandConfig):
    """Settings of `rlhf doctor`."""

    doctor: DoctorGroup = DoctorGroup()
