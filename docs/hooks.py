"""Hooks of the documentation site: tables of flags and metrics, made when the site is built.

A page asks for a table by a comment of its own line: `<!-- flags: ppo -->`, `<!-- metrics: ppo -->`. Flags come from
the settings of the command, metrics from metrics.yaml, so no page repeats either by hand.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from rlhf_cli.command_table import COMMANDS, OFFLINE, ONLINE
from rlhf_cli.flags import Flag, describe, flags_of

METRICS_FILE = Path(__file__).with_name("metrics.yaml")
MARKER = re.compile(r"^<!-- (flags|metrics): (\S+) -->$", re.MULTILINE)
PAPER = re.compile(r"(?<![\w./])(\d{4}\.\d{5})(?!\w)")
PROTECTED = re.compile(r"(<(?:code|pre|a)\b.*?</(?:code|pre|a)>)", re.DOTALL)

PANELS = {OFFLINE: "offline", ONLINE: "online"}
"""Names that stand for all commands of a panel in metrics.yaml."""

Cells = tuple[str, ...]


def on_post_build(config: Any, **_: Any) -> None:
    """Write the index of the search as a script too: pages that are opened as files may not fetch it."""
    search = Path(config["site_dir"], "search")
    index = (search / "search_index.json").read_text(encoding="utf-8")
    (search / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with a table in place of each marker; MkDocs calls this."""
    return MARKER.sub(lambda found: TABLES[found[1]](found[2]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with a link for each arXiv number in its text; MkDocs calls this.

    Empty header cells become plain cells, which screen readers do not announce as headers.
    """
    html = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)
    # Odd parts are code and links, which stay as they are.
    parts = PROTECTED.split(html)
    parts[::2] = (PAPER.sub(r'<a href="https://arxiv.org/abs/\1">\1</a>', part) for part in parts[::2])
    return "".join(parts)


def flags_table(command: str) -> str:
    """Return the tables of a command's flags, one for each panel of its help page."""
    panels: dict[str, list[Flag]] = {}
    for flag in flags_of(COMMANDS[command].config_class).values():
        panels.setdefault(flag.panel, []).append(flag)
    tables = []
    for panel, flags in panels.items():
        rows = [(f"`--{flag.name}`", describe(flag), flag.help) for flag in flags]
        tables.append(f"### {panel}\n\n{table(('flag', 'value', 'meaning'), rows)}")
    return "\n\n".join(tables)


def metrics_table(command: str) -> str:
    """Return the table of a command's metrics."""
    return table(("metric", "meaning"), [(f"`{metric['name']}`", metric["text"]) for metric in metrics_of(command)])


def metrics_of(command: str) -> list[dict[str, str]]:
    """Return the documented metrics of a command, in the order of the file."""
    names = {command, PANELS.get(COMMANDS[command].panel, command)}
    # A flag stands for all commands that have it.
    names |= {f"--{flag}" for flag in flags_of(COMMANDS[command].config_class)}
    documented = yaml.safe_load(METRICS_FILE.read_text(encoding="utf-8"))
    return [metric for metric in documented if names & set(metric["commands"].split())]


def table(header: Cells, rows: Iterable[Cells]) -> str:
    """Return a Markdown table."""
    head, *body = ["| " + " | ".join(map(escaped, cells)) + " |" for cells in (header, *rows)]
    return "\n".join([head, "|" + " --- |" * len(header), *body])


def escaped(cell: str) -> str:
    """Return the text for a cell: code stays as it is, flags become code, other characters of Markdown are escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(cell.split()))
    return "".join(part if part.startswith("`") else _escaped_text(part) for part in parts)


def _escaped_text(text: str) -> str:
    parts = re.split(r"((?<![\w-])--[a-z]\w*)", text)
    shown = (f"`{part}`" if part.startswith("--") else re.sub(r"([<>*_{}\[\]|])", r"\\\1", part) for part in parts)
    return "".join(shown).replace("\\<", "&lt;")


TABLES: dict[str, Callable[[str], str]] = {"flags": flags_table, "metrics": metrics_table}
