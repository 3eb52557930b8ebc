"""The contents of files with others' code: people mend such files in the middle of a run, so a change is reported.

Modules that a file imports are not looked at.
"""

from collections.abc import Mapping

from rlhf_cli.backends.training.checkpoint import Checkpoint

PLUGIN_FILES = "contents of files with others' code"
"""Name of the hashes in the state of a checkpoint."""


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
