"""The contents of files with others' code: people mend such files in the middle of a run, so a change is reported.

Modules that a file imports are not looked at.
"""

import hashlib
from collections.abc import Mapping

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.config.episodes import EnvironmentConfig, environment_kind
from rlhf_cli.rewards.workers.user_module import file_and_name

PLUGIN_FILES = "contents of files with others' code"
"""Name of the hashes in the state of a checkpoint."""
ENVIRONMENT_FILE = "contents of the environment file"
"""Name of the hash in the identity of answers."""


def file_hash(source: str) -> str | None:
    """Return a hash of FILE.py or FILE.py:NAME; None if it cannot be read, which its loading reports."""
    path, _ = file_and_name(source)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path.is_file() else None


def environment_file_hash(settings: EnvironmentConfig) -> str | None:
    """Return a hash of the environment's file, None without one."""
    source = settings.environment
    return file_hash(source) if source is not None and environment_kind(source) == "file" else None


def environment_contents(settings: EnvironmentConfig) -> dict[str, str]:
    """Return the hash of the environment's file by its setting, {} without one."""
    found = environment_file_hash(settings)
    return {} if found is None else {"environment": found}


def plugin_notice(checkpoint: Checkpoint | None, contents: Mapping[str, str]) -> list[str]:
    """Return a line for each setting whose file is not the file that the checkpoint's run had.

    Args:
        contents: hashes of the files by setting, see `contents_of_plugins`.
    """
    if checkpoint is None:
        return []
    written = checkpoint.state.get(PLUGIN_FILES, {})
    changed = [name for name, found in contents.items() if written.get(name, found) != found]
    return [
        f"the file of --{name} has changed since the checkpoint of step {checkpoint.step}: "
        "from here on the new code runs"
        for name in changed
    ]
