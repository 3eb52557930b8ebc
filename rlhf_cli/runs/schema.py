"""Implementation of `rlhf schema`: JSON Schema of a settings file."""

import json

from pydantic_core import PydanticUndefined, to_jsonable_python

from rlhf_cli.command_table import COMMANDS
from rlhf_cli.commands.schema import SchemaConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.flags import Flag, flags_of
from rlhf_cli.settings_file import EXTENDS

_Schema = dict[str, object]

_TEXTS: _Schema = {"type": "string"}


def print_schema(config: SchemaConfig) -> None:
    """Print the schema as JSON."""
    name = config.schema_of.for_
    print(json.dumps(settings_schema(name, COMMANDS[name].config_class), indent=1, ensure_ascii=False))


def settings_schema(name: str, config_cls: type[CommandConfig]) -> _Schema:
    """Return the JSON Schema (2020-12) of a YAML file for `--config` of a command.

    Settings without a default are not required, because flags and extended files may set them.
    """
    properties: _Schema = {EXTENDS: {"anyOf": [_TEXTS, {"type": "array", "items": _TEXTS}]}}
    definitions: _Schema = {}
    flags = flags_of(config_cls)
    for group in dict.fromkeys(flag.group for flag in flags.values()):
        schema = config_cls.group_class(group).model_json_schema()
        definitions |= schema.get("$defs", {})
        own = [flag for flag in flags.values() if flag.group == group]
        properties |= {flag.name: _property(flag, schema["properties"][flag.name]) for flag in own}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Settings of rlhf {name}",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **({"$defs": definitions} if definitions else {}),
    }


def _property(flag: Flag, schema: _Schema) -> _Schema:
    """Return a setting's schema with its help text, its default in this command, and the values that files may have."""
    told = ("title", "description", "default")
    kind = {key: value for key, value in schema.items() if key not in told}
    # Files may also have a list as text, and auto or null for a switch or number that is chosen at the start.
    more: list[_Schema] = [_TEXTS] if flag.is_list else []
    more += [{"enum": ["auto", None]}] if flag.optional and flag.annotation is bool else []
    kind = {"anyOf": [kind, *more]} if more else kind
    default = {} if flag.default is PydanticUndefined else {"default": to_jsonable_python(flag.default)}
    return {"description": f"{flag.help} [{flag.panel}]", **kind, **default}
