"""The key that reward servers ask for: read from the environment, so that no file, log or process list has it."""

import os

from rlhf_cli.errors import UsageError


def api_key(variable: str) -> str | None:
    """Return the key in an environment variable, None if it is not set. UsageError for one that no header can carry."""
    key = os.environ.get(variable, "")
    if not key:
        return None
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"the key in {variable} has to be printable ASCII without spaces")
    return key
