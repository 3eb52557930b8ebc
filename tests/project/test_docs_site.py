"""The documentation site builds in strict mode, loads nothing from other servers, and its tables match the code."""

import ast
import asyncio
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from aiohttp import ClientSession
from headless import CHROMIUM, accessibility_problems, chromium, new_page
from site_hooks import DOCS, REPOSITORY, site_hooks, undocumented

from rlhf_cli import cli
from rlhf_cli.command_table import COMMANDS, TRAINING
from rlhf_cli.flags import flags_of


def build(site: Path, *, config: Path = REPOSITORY / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=250, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    outcome = build(folder)
    assert outcome.returncode == 0, outcome.stderr
    return folder


def test_arxiv_numbers_in_text_are_links_and_those_in_code_are_not():
    html = "<td>2203.02155</td><p>arXiv 1707.06347, <code>2503.20783</code> and <a href='x'>2402.03300</a> 0.12345</p>"
    link = '<a href="https://arxiv.org/abs/{0}">{0}</a>'
    assert site_hooks().on_page_content(html) == html.replace("2203.02155", link.format("2203.02155")).replace(
        "1707.06347", link.format("1707.06347")
    )


def test_the_page_of_each_command_has_all_of_its_flags(site):
    for name, entry in cli.COMMANDS.items():
        text = unescape((site / "commands" / f"{name}.html").read_text())
        missing = [flag for flag in flags_of(entry.config_class) if f"<td><code>--{flag}</code></td>" not in text]
        assert not missing, f"{name}: {missing}"


def test_no_table_of_flags_or_metrics_is_left_a_marker(site):
    for page in site.rglob("*.html"):
        assert "<!-- flags" not in page.read_text()
        assert "<!-- metrics" not in page.read_text()


def test_pages_load_nothing_from_other_servers(site):
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]*src=\"?(?:https?:)?//|<link[^>]*rel=\"?(?:stylesheet|preload|preconnect)[^>]*href=\"?(?:https?:)?//"
    )
    assert not [page.name for page in site.rglob("*.html") if loaded.search(page.read_text())]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](index.md#gone)", "#gone"),
    ],
)
def test_a_broken_link_fails_the_build(text, complaint, tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "index.md").write_text(f"# Start\n\n{text}\n")
    shutil.copy(DOCS / "hooks.py", folder)
    shutil.copy(REPOSITORY / "mkdocs.yml", tmp_path)
    config = re.sub(r"^nav:.*", "", (tmp_path / "mkdocs.yml").read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "mkdocs.yml").write_text(config)
    outcome = build(tmp_path / "site", config=tmp_path / "mkdocs.yml")
    assert outcome.returncode != 0
    assert complaint in outcome.stderr


def test_cells_of_a_table_show_characters_of_markdown_as_they_are():
    table = site_hooks().table(("flag", "meaning"), [("`--a`", "one | two <b> *c* {d} --max_len `x_y`")])
    assert table.splitlines()[2] == r"| `--a` | one \| two &lt;b\> \*c\* \{d\} `--max_len` `x_y` |"


@functools.cache
def words_of_the_code() -> set[str]:
    """Return every string in the code and its parts between slashes, so that `critic/` and `lr` match `critic/lr`."""
    found: set[str] = set()
    for path in (REPOSITORY / "rlhf_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value, *node.value.split("/")}
    return found


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_documented_metric_is_a_name_in_the_code(name):
    words = words_of_the_code()
    documented = [metric["name"] for metric in site_hooks().metrics_of(name)]
    parts = {part for metric in documented for part in metric.split("/") if "<" not in part}
    assert not parts - words


def test_a_metric_that_no_page_has_is_named():
    assert undocumented("ppo", ["kl", "reward/gsm8k", "critic/lr", "invented", "eval/pass@8"]) == ["invented"]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_page_of_each_command_has_its_files_its_advice_and_its_flags(name):
    page = (DOCS / "commands" / f"{name}.md").read_text()
    headings = re.findall(r"^## (.+)$", page, flags=re.MULTILINE)
    assert {"Output", "Troubleshooting", "Flags"} <= set(headings)
    trains = name in TRAINING
    assert not trains or {"Formulas", "Metrics"} <= set(headings)
    assert not trains or re.search(r"arXiv\s+\d{4}\.\d{5}|[Nn]o paper", page)


def test_the_search_of_a_page_that_is_opened_as_a_file_has_its_index_and_its_worker(site):
    index = (site / "search" / "search_index.json").read_text()
    assert (site / "search" / "search_index.js").read_text() == f"var __index = {index}"
    for page in site.rglob("*.html"):
        scripts = re.findall(r'<script src="([^"]+)"', page.read_text())
        names = [Path(script).name.partition(".")[0] for script in scripts]
        assert names.index("file_worker") < names.index("bundle"), page


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the site's own search")
def test_the_search_finds_a_page_when_it_is_opened_as_a_file(site):
    program = REPOSITORY / "tests" / "helpers" / "search_as_file.js"
    done = subprocess.run(["node", program, site, "quantized"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip(), done.stderr
    assert all((site / place.partition("#")[0]).is_file() for place in done.stdout.split())


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
def test_pages_are_accessible_in_light_and_dark(site, tmp_path_factory):
    async def check(browser: str) -> list[str]:
        found = []
        async with ClientSession() as session:
            page = await new_page(session, browser)
            for name, dark in itertools.product(("index", "learn/curves", "commands/grpo", "status"), (False, True)):
                await page.open((site / f"{name}.html").as_uri(), dark=dark)
                await page.until("document.readyState === 'complete' && document.querySelector('h1') !== null")
                found += [f"{name}: {problem}" for problem in await accessibility_problems(page)]
        return found

    # Chromium's socket needs a short path.
    with chromium(tmp_path_factory.mktemp("c")) as browser:
        assert "\n".join(asyncio.run(check(browser))) == ""
