"""Hashes of plugin files with user code. Users fix such files during a run, so changes are reported on resuming.

Imported modules are not included.
"""

import hashlib
from collections.abc import Mapping

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.config.episodes import EpisodeConfig, environment_kind
from rlhf_cli.rewards.workers.user_module import file_and_name

PLUGIN_FILES = "contents of files with others' code"
"""Key for the hashes in a checkpoint's state."""
ENVIRONMENT_FILE = "contents of the environment file"
"""Key for the hash in the identity of generated responses."""


def file_hash(source: str) -> str | None:
    """Hash a file given as FILE.py or FILE.py:NAME. Returns None if it does not exist; loading reports the error."""
    path, _ = file_and_name(source)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path.is_file() else None


def environment_file_hash(settings: EpisodeConfig) -> str | None:
    """Hash the environment file; None without one."""
    source = settings.environment
    return file_hash(source) if source is not None and environment_kind(source) == "file" else None


def environment_contents(settings: EpisodeConfig) -> dict[str, str]:
    """Return {"environment": hash of the file}, or {} without an environment file."""
    digest = environment_file_hash(settings)
    return {} if digest is None else {"environment": digest}


def plugin_notice(checkpoint: Checkpoint | None, contents: Mapping[str, str]) -> list[str]:
    """Return a notice for each plugin file that has changed since the checkpoint.

    Args:
        checkpoint: the checkpoint to resume, if any.
        contents: file hashes by setting name.
    """
    if checkpoint is None:
        return []
    written = checkpoint.state.get(PLUGIN_FILES, {})
    # Settings added since the checkpoint have no earlier hash.
    changed = [name for name, digest in contents.items() if written.get(name, digest) != digest]
    return [
        f"the --{name} file has changed since the checkpoint of step {checkpoint.step}: the run continues with the new "
        "code"
        for name in changed
    ]
