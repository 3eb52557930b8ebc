"""`rlhf doctor`: check the installation and this machine, with a fix for each problem."""

from pydantic import Field

from rlhf_cli.config.base import CommandConfig, SettingsGroup


class DoctorGroup(SettingsGroup):
    """Doctor"""

    smoke_tests: bool = True
    """Run each component once: attention kernel, DeepSpeed step, rollout engine, weight push, Ray.

    All checks together are limited to 10 minutes.
    """
    as_json: bool = Field(False, alias="json")
    """Print the findings as a JSON object."""
    models: bool = False
    """Print the model types that train as a Markdown table, without any check."""
    report: bool = False
    """Print Markdown for a bug report, without home paths, names and keys."""


class DoctorConfig(CommandConfig):
    """Check versions, GPUs, memory, disk and Ray, and run each component once.

    The exit status is 1 if a run would fail. For a bug report, paste the output of `rlhf doctor --report`.
    """

    doctor: DoctorGroup = DoctorGroup()
