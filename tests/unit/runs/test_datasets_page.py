"""Each row on docs/datasets.md is read by the commands of its section."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_data_command import model, page  # noqa: F401

PAGE = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text()


def rows() -> Iterator[tuple[str, str]]:
    """Yield each command with a row of its section."""
    for section in PAGE.split("\n## ")[1:]:
        commands, _, text = section.partition("\n")
        for row in re.findall(r"```json\n(.*?)\n```", text):
            yield from ((command, row) for command in commands.split(", ") if command != "gkd")


@pytest.mark.parametrize(("command", "row"), rows())
def test_a_row_of_the_page_is_read(command, row, model, tmp_path):  # noqa: F811
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    shown = page(command, str(path), model, max_len=2048)
    assert "1 row" in shown
    content = json.loads(row)
    last = content.get("answer") or content.get("output") or content.get("response") or "7"
    if command in ("sft", "distill"):
        assert last.splitlines()[-1] in shown


def test_every_section_has_rows():
    assert {command for command, _ in rows()} >= {"sft", "distill", "dpo", "rm", "kto", "prm", "ppo", "grpo", "remax"}
