"""Help pages: framed panels with two columns of wrapped text, readable at 80 columns.

Not based on rich, whose import would take most of the time in `rlhf --help`. options.py and cli.py provide the text.
"""

import os
import shutil
import sys
from textwrap import wrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_Row = tuple[str, str]
"""(name, help)."""

# Page width in columns. Longer lines are hard to read.
_MIN_WIDTH, _MAX_WIDTH = 50, 110
# Maximum width of the left column. Longer names get a separate line.
_MAX_NAME = 34


class HelpPageCommand(TyperCommand):
    """A command with panels in its help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_page(self, ctx, usage=f"{ctx.command_path} {self.options_metavar}"))


class HelpPageGroup(TyperGroup):
    """A command group with panels in its help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_page(self, ctx, usage=f"{ctx.command_path} COMMAND [--FLAG VALUE]..."))


def _page(command: TyperCommand | TyperGroup, ctx: Any, *, usage: str) -> str:
    """Format the help page for a command or group, at terminal width."""
    width = min(max(shutil.get_terminal_size().columns, _MIN_WIDTH), _MAX_WIDTH)
    panels: dict[str, list[_Row]] = {"Options": []}
    for option in command.get_params(ctx):
        if isinstance(option, typer.core.TyperOption) and not option.hidden:
            rows = panels.setdefault(option.rich_help_panel or "Options", [])
            rows.append((", ".join(sorted(option.opts, key=len, reverse=True)), option.help or ""))
    if isinstance(command, TyperGroup):
        for name, member in command.commands.items():
            assert isinstance(member, TyperCommand)
            panels.setdefault(member.rich_help_panel or "Commands", []).append((name, member.short_help or ""))
    paragraphs = [" ".join(text.split()) for text in (command.help or "").split("\n\n")]
    lines = [_bold(f"Usage: {usage}"), ""]
    for paragraph in paragraphs:
        lines += [*wrap(paragraph, width), ""]
    for title, rows in panels.items():
        lines += _panel(title, rows, width)
    return _encodable("\n".join(lines) + "\n")


def _panel(title: str, rows: list[_Row], width: int) -> list[str]:
    inner = width - 4
    left = min(max(len(name) for name, _ in rows), _MAX_NAME)
    lines = [f"╭─ {_bold(title)} {'─' * (width - len(title) - 5)}╮"]
    for name, text in rows:
        body = wrap(text, inner - left - 2) or [""]
        if len(name) > left:
            lines.append(_framed(_cyan(name), len(name), inner))
            name = ""
        for number, line in enumerate(body):
            shown = name if number == 0 else ""
            content = _cyan(shown) + " " * (left - len(shown) + 2) + line
            lines.append(_framed(content, left + 2 + len(line), inner))
    return [*lines, f"╰{'─' * (width - 2)}╯"]


def _framed(content: str, length: int, inner: int) -> str:
    return f"│ {content}{' ' * (inner - length)} │"


def _bold(text: str) -> str:
    return typer.style(text, bold=True) if _colours() else text


def _cyan(text: str) -> str:
    return typer.style(text, fg="cyan", bold=True) if text and _colours() else text


def _colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _encodable(text: str) -> str:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(str.maketrans("╭╮╰╯─│", "++++-|")).encode("ascii", "replace").decode()
    return text
