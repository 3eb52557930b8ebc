"""Files that the pages name exist, and the page of the architecture stays short where names should speak."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
FILES = [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*.py") if ".venv" not in path.parts]
OWN_FOLDERS = ("algorithms/", "backends/", "commands/", "config/", "data/", "models/", "rewards/", "runs/")
MOST_ROWS = 15


def missing_files(text: str) -> list[str]:
    """Return the Python files of this project that a page names in backticks and that do not exist."""
    named = re.findall(r"`([\w/]+\.py)`", text)
    own = [name for name in named if name.startswith((*OWN_FOLDERS, "rlhf_cli/", "tests/", "tracking/", "trainers/"))]
    tests = [name for name in named if name.rpartition("/")[2].startswith("test_")]
    return [name for name in own + tests if not any(f"/{file}".endswith(f"/{name}") for file in FILES)]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(REPOSITORY)) for page in PAGES])
def test_files_that_a_page_names_exist(page):
    assert missing_files(page.read_text()) == []


def test_a_file_that_does_not_exist_is_found():
    text = "see `backends/no_such.py`, `test_no_such.py`, `models/policy.py`, `my_reward.py`"
    assert missing_files(text) == ["backends/no_such.py", "test_no_such.py"]


def test_the_table_of_places_has_few_rows():
    text = (REPOSITORY / "docs/architecture.md").read_text()
    table = text.partition("## Where to find things")[2].partition("\nTo add something")[0]
    assert 0 < len([line for line in table.splitlines() if line.startswith("| ")]) - 1 <= MOST_ROWS
