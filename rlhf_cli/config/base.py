"""What every settings group has in common."""

import os

from pydantic import BaseModel, ConfigDict, field_validator

OUTPUTS = ("output", "save_path", "ckpt_path", "write_pass_rate")
"""Settings of any group that name what is written."""


class Group(BaseModel):
    """Base of every settings group: immutable, no unknown keys, docstrings are help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False)

    @field_validator(*OUTPUTS, check_fields=False)
    @classmethod
    def _home_is_meant_by_a_tilde(cls, path: str | None) -> str | None:
        return path if path is None else os.path.expanduser(path)

    def changed(self, *names: str) -> str | None:
        """The first of these settings that is not what it is by default."""
        fields = type(self).model_fields
        return next((name for name in names if getattr(self, name) != fields[name].default), None)
