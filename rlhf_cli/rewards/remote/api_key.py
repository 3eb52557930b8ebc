"""Reward server API key, read from the environment so that it never appears in files, logs or process lists."""

import os

from rlhf_cli.errors import UsageError


def api_key(variable: str) -> str | None:
    """Return the key from an environment variable, or None if unset. Raises UsageError if it is not a valid header."""
    key = os.environ.get(variable, "")
    if not key:
        return None
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"the key in {variable} must be printable ASCII without spaces")
    return key
