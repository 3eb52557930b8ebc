"""The files that newcomers open first are short, have valid links, and match the code."""

import re
from pathlib import Path

import pytest
import yaml
from site_hooks import REPOSITORY

from rlhf_cli.version import __version__

MAX_README_LINES = 200
MAX_PICTURE_BYTES = 200_000
PAGES = sorted(REPOSITORY.glob("*.md"))


def links(page: Path) -> list[str]:
    """Return link and image targets of a page that are files of the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target for target in targets if not target.startswith(("http://", "https://", "#"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as on GitHub and the documentation site."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_readme_has_at_most_200_lines():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        assert (REPOSITORY / path).exists(), link
        assert not anchor or anchor in anchors(REPOSITORY / path), link


def test_the_readme_links_every_page_of_the_site_that_has_no_other_way_in():
    listed = {link.partition("#")[0] for link in links(REPOSITORY / "README.md")}
    pages = {f"docs/{page.name}" for page in (REPOSITORY / "docs").glob("*.md")} - {"docs/index.md"}
    assert pages <= listed


def test_pictures_are_small():
    pictures = list((REPOSITORY / "docs" / "assets").iterdir())
    assert pictures
    assert all(picture.stat().st_size <= MAX_PICTURE_BYTES for picture in pictures)


def test_the_citation_has_the_version_of_the_program():
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == __version__


def test_every_issue_form_asks_for_the_doctors_report():
    forms = [path for path in (REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for form in forms:
        fields = {field.get("id"): field for field in yaml.safe_load(form.read_text())["body"]}
        assert "rlhf doctor --report" in fields["doctor"]["attributes"]["label"]
