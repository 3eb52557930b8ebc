"""A resumed run reports changed files of user code."""

from pathlib import Path

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.config.episodes import EpisodeConfig
from rlhf_cli.runs.plugin_files import PLUGIN_FILES, environment_contents, plugin_notice


def checkpoint(**contents: str) -> Checkpoint:
    return Checkpoint(Path("x"), step=3, state={PLUGIN_FILES: contents})


def test_a_changed_file_is_reported_and_the_same_file_is_not() -> None:
    same = {"policy_loss": "aa", "loss": "bb"}
    assert plugin_notice(None, same) == []
    assert plugin_notice(checkpoint(**same), same) == []
    [line] = plugin_notice(checkpoint(**same), {**same, "loss": "cc"})
    assert line.startswith("the --loss file has changed since the checkpoint of step 3")


def test_a_checkpoint_from_before_is_continued_in_silence() -> None:
    assert plugin_notice(Checkpoint(Path("x"), step=3, state={}), {"loss": "cc"}) == []


def test_an_environment_that_was_mended_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text("class Environment: ...")
    settings = EpisodeConfig(environment=str(file))
    saved = checkpoint(**environment_contents(settings))
    assert plugin_notice(saved, environment_contents(settings)) == []
    file.write_text("class Environment: mended = True")
    [line] = plugin_notice(saved, environment_contents(settings))
    assert line.startswith("the --environment file has changed since the checkpoint of step 3")


def test_a_server_has_no_file_that_could_change() -> None:
    for source in ("ws://localhost:8000", "mcp:python server.py"):
        assert environment_contents(EpisodeConfig(environment=source)) == {}
    assert environment_contents(EpisodeConfig()) == {}
