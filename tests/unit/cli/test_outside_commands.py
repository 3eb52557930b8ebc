"""Custom commands `rlhf file.py:NAME`, as documented on the page on extending."""

from pathlib import Path

import pytest
from extending_page import page_file

from rlhf_cli import cli


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit status and output of the program."""
    status = cli.main(words)
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_the_help_page_has_the_flags_of_the_command_and_its_own(tmp_path, capsys):
    status, printed = outcome([f"{page_file(tmp_path, 'focal_sft.py')}:focal_sft", "--help"], capsys)
    assert status == 0
    assert "Fine-tune on examples with a loss" in printed
    assert "--focus" in printed
    assert "--train_batch_size" in printed


def test_wrong_settings_are_named_as_in_other_commands(tmp_path, capsys, monkeypatch):
    page_file(tmp_path, "focal_sft.py")
    monkeypatch.chdir(tmp_path)
    words = ["--pretrain", "m", "--dataset", "d", "--output", "o", "--focus", "-1", "--learning_rat", "1"]
    status, printed = outcome(["focal_sft.py:focal_sft", *words], capsys)
    assert status == 2
    assert printed.startswith("rlhf focal_sft.py:focal_sft: ")
    assert "--focus" in printed
    assert "did you mean --learning_rate?" in printed


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def f():\n    pass\n", "f", "f must have a parameter `config` annotated with a config class"),
        ("def f(config: int):\n    pass\n", "f", "f must have a parameter `config`"),
        ("x = 1\n", "f", "has no f; it has no function"),
        ("import nothing_like_this\n", "f", "the import of"),
        ("raise SystemExit(0)\n", "f", "raises SystemExit"),
    ],
)
def test_code_that_is_no_command_is_one_sentence(tmp_path: Path, capsys, source, name, message):
    file = tmp_path / "code.py"
    file.write_text(source)
    status, printed = outcome([f"{file}:{name}", "--pretrain", "m"], capsys)
    assert status == 2
    assert message in printed
    assert printed.count("\n") == 1


def test_a_word_with_a_colon_that_names_no_code_is_refused(capsys):
    assert outcome(["sft:now"], capsys)[0] == 2
    status, printed = outcome(["http://x"], capsys)
    assert (status, "is neither a command nor file.py:NAME" in printed) == (2, True)
