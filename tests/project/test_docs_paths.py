"""Files and classes that the pages mention exist, including those in diagrams."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
FILES = [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*.py") if ".venv" not in path.parts]
OWN_FOLDERS = ("algorithms/", "backends/", "commands/", "config/", "data/", "models/", "rewards/", "runs/")
ARCHITECTURE = sorted((REPOSITORY / "docs/architecture").glob("*.md"))
MOST_ROWS = 15
FROM_LIBRARIES = {"ProcessPool"}
"""Classes on the architecture pages that come from libraries."""


def missing_files(text: str) -> list[str]:
    """Return the Python files in backticks on a page that do not exist."""
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


def unknown_names(text: str, known: set[str]) -> list[str]:
    """Return the Python files and classes in a text that do not exist; `known` has all identifiers of the package."""
    files = re.findall(r"(?<![\w*/])((?:\w+/)*\w+\.py)\b", text)
    classes = re.findall(r"`([A-Z]+[a-z]\w*)", text)
    lost = [name for name in files if not any(f"/{file}".endswith(f"/{name}") for file in FILES)]
    return lost + [name for name in classes if name not in known | FROM_LIBRARIES]


@pytest.fixture(scope="module")
def words_of_the_package() -> set[str]:
    sources = (path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "rlhf_cli").rglob("*.py")))
    return {word for source in sources for word in re.findall(r"\w+", source)}


@pytest.mark.parametrize("page", ARCHITECTURE, ids=[page.name for page in ARCHITECTURE])
def test_names_on_an_architecture_page_exist(page, words_of_the_package):
    assert unknown_names(page.read_text(), words_of_the_package) == []


def test_an_unknown_file_in_a_diagram_and_an_unknown_class_are_found():
    text = "```text\nloop -> no_such.py, policy.py\n```\n`Pack`, `NoSuchPack.read`, `test_*.py`, KV"
    assert unknown_names(text, {"Pack"}) == ["no_such.py", "NoSuchPack"]


def test_the_table_of_places_has_few_rows():
    text = (REPOSITORY / "docs/architecture/index.md").read_text()
    table = text.partition("## Where to find things")[2].partition("\nTo add something")[0]
    assert 0 < len([line for line in table.splitlines() if line.startswith("| ")]) - 1 <= MOST_ROWS
