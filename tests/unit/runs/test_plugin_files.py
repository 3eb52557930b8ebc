"""A continued run reports changed files with others' code."""

from pathlib import Path

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.runs.plugin_files import PLUGIN_FILES, plugin_notice


def checkpoint(**contents: str) -> Checkpoint:
    return Checkpoint(Path("x"), step=3, state={PLUGIN_FILES: contents})


def test_a_changed_file_is_reported_and_the_same_file_is_not() -> None:
    same = {"policy_loss": "aa", "loss": "bb"}
    assert plugin_notice(None, same) == []
    assert plugin_notice(checkpoint(**same), same) == []
    [line] = plugin_notice(checkpoint(**same), {**same, "loss": "cc"})
    assert line.startswith("the file of --loss has changed since the checkpoint of step 3")


def test_a_checkpoint_from_before_is_continued_in_silence() -> None:
    assert plugin_notice(Checkpoint(Path("x"), step=3, state={}), {"loss": "cc"}) == []
