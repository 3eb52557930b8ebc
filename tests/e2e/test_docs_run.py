"""Run the documentation's shell blocks that work on this machine, in navigation order.

A block runs if the line before it is the comment `<!-- runs -->`. Python blocks that start with a file name are written
first; the last one with a name wins. All blocks share a folder with a tiny model in runs/sft, data files of each kind
under data/, the reward file in docs/howto/own-reward.md, and the examples. The learn pages name their model `$MODEL`,
here the untrained tiny one.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from documented_blocks import REPOSITORY, add_program, marked_blocks, shell, write_named_files

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

MARK = "runs"
NAVIGATION = re.findall(r"\S+\.md", (REPOSITORY / "mkdocs.yml").read_text())
PAGES = [page for name in NAVIGATION if marked_blocks(page := REPOSITORY / "docs" / name, MARK)]


def sums(count: int) -> list[tuple[str, str, str]]:
    """Return questions with a correct and a wrong answer."""
    pairs = [(number % 40, number * 7 % 40) for number in range(count)]
    return [(f"What is {a} + {b}?", str(a + b), str(a + b + 1)) for a, b in pairs]


def write_rows(folder: Path) -> None:
    """Write the data files that the blocks use."""
    rows = sums(160)
    files: dict[str, list[dict[str, Any]]] = {
        "data/train.jsonl": [{"prompt": q, "response": right} for q, right, _ in rows],
        "data/pairs.jsonl": [{"prompt": q, "chosen": right, "rejected": wrong} for q, right, wrong in rows],
        "data/labelled.jsonl": [
            {"prompt": q, "completion": (right, wrong)[number % 2], "label": number % 2 == 0}
            for number, (q, right, wrong) in enumerate(rows)
        ],
        "data/steps.jsonl": [
            {"prompt": q, "completions": ["I add.", f"It is {answer}."], "labels": [True, answer == right]}
            for q, right, wrong in rows
            for answer in (right, wrong)
        ],
        "prompts.jsonl": [{"prompt": q, "answer": right} for q, right, _ in rows[:8]],
    }
    files["data/held_out.jsonl"] = files["data/pairs.jsonl"][:32]
    files["data/held_out_steps.jsonl"] = files["data/steps.jsonl"][:32]
    (folder / "data").mkdir()
    for name, content in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    write_named_files(REPOSITORY / "docs" / "howto" / "own-reward.md", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("documented")
    add_program(home)
    (home / "examples").symlink_to(REPOSITORY / "examples")
    write_rows(home)
    shell("rlhf scratch --dataset data/train.jsonl --output models/start", home)
    shell("rlhf sft --pretrain models/start --dataset data/train.jsonl --output runs/sft", home)
    return home


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_marked_blocks_of_a_page_run(page, folder):
    write_named_files(page, folder)
    for block in marked_blocks(page, MARK):
        shell(block, folder)


def test_pages_with_marked_blocks_are_found():
    assert len(PAGES) >= 5
