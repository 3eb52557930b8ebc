"""Teachers by data source."""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from rlhf_cli.config.base import object_text


def _models_by_source(value: object) -> str | None:
    """Return a JSON object as text. Raise ValueError if one of its values is not a model."""
    if value is None:
        return None
    text = object_text(value)
    for source, model in json.loads(text).items():
        if not isinstance(model, str) or not model.strip():
            raise ValueError(f"{source}: {json.dumps(model)} is not a model folder or name")
    return text


ModelsBySource = Annotated[
    str | None, BeforeValidator(_models_by_source), WithJsonSchema({"type": ["string", "object", "null"]})
]
"""Models by source name or pattern: a JSON object as text; YAML files may use a mapping. None if it is not set."""


def teachers_of(pretrain: str, by_source: str | None) -> tuple[str, ...]:
    """Return the distinct teachers in order, the common one first.

    Example: `teachers_of("a", '{"math": "b", "code": "a"}') == ("a", "b")`.
    """
    return tuple(dict.fromkeys([pretrain, *json.loads(by_source or "{}").values()]))


def source_of_teacher(source: str, by_source: Mapping[str, str]) -> str | None:
    """Return the entry for a row's source: its name, otherwise the first pattern that matches it; None without one."""
    if source in by_source:
        return source
    return next((name for name in by_source if fnmatchcase(source, name)), None)
