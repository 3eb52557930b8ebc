"""What every settings group has in common."""

from pydantic import BaseModel, ConfigDict


class Group(BaseModel):
    """Base of every settings group: immutable, no unknown keys, docstrings are help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False)

    def changed(self, *names: str) -> str | None:
        """The first of these settings that is not what it is by default."""
        fields = type(self).model_fields
        return next((name for name in names if getattr(self, name) != fields[name].default), None)
