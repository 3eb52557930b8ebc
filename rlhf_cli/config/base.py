"""What every settings group has in common."""

import json
import os
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator
from pydantic_core import to_jsonable_python

OUTPUTS = ("output", "save_path", "ckpt_path", "write_pass_rate")
"""Settings of any group that name output paths."""


def _object_text(value: Any) -> str:
    """Return the JSON text of an object, which a YAML file may also write as a mapping."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"must be a JSON object like '{{\"name\": 1}}': {error}") from None
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object like '{\"name\": 1}'")
    return text


JsonObject = Annotated[str, BeforeValidator(_object_text)]
"""JSON text of an object; YAML files may write a mapping."""


class SettingsGroup(BaseModel):
    """Base of every settings group: immutable, no unknown keys, docstrings are help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False)

    @field_validator(*OUTPUTS, check_fields=False)
    @classmethod
    def _home_is_meant_by_a_tilde(cls, path: str | None) -> str | None:
        if path is not None and not path.strip():
            raise ValueError("the name of a folder or file is empty")  # as of a variable that is not set
        return path if path is None else os.path.expanduser(path)

    def changed(self, *names: str) -> str | None:
        """Return the first of these settings that differs from its default."""
        fields = type(self).model_fields
        return next((name for name in names if getattr(self, name) != fields[name].default), None)


def default_settings(config: BaseModel) -> dict[str, object]:
    """Return the default of each setting of a command by name, as JSON; settings that must be given have none."""
    groups = (getattr(config, name) for name in type(config).model_fields)
    return {
        name: to_jsonable_python(field.get_default(call_default_factory=True))
        for group in groups
        for name, field in type(group).model_fields.items()
        if not field.is_required()
    }
