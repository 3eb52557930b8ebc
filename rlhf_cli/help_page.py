"""Help pages: framed panels with two columns of wrapped text, readable at 80 columns.

A command with more flags than fit a screen shows an example with its flags; `--help all` shows every flag, and
`--help TOPIC` those of a panel or with this word in their name.

Not based on rich, whose import would take most of the time in `rlhf --help`. options.py and cli.py provide the text.
"""

import os
import re
import shutil
import sys
from textwrap import wrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from rlhf_cli.errors import UsageError

_Row = tuple[str, str]
"""(name, help)."""
_Panels = dict[str, list[_Row]]

SCREEN_LINES = 40
"""Length of a help page that is shown whole."""
HELP_FLAGS = ("--help", "-h")

# Page width in columns. Longer lines are hard to read.
_MIN_WIDTH, _MAX_WIDTH = 50, 110
# Maximum width of the left column. Longer names get a separate line.
_MAX_NAME = 34


class HelpPageCommand(TyperCommand):
    """A command with panels in its help page.

    - `example`: arguments of a typical call, with the main flags.
    - `outside`: titles of panels with settings of external code, which short pages show too.
    """

    example = ""
    outside: frozenset[str] = frozenset()
    topic = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.topic = _topic_of(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        usage, panels = f"{ctx.command_path} {self.options_metavar}", _panels_of(self, ctx)
        whole = _page(self, panels, usage=usage)
        if self.topic not in ("", "all"):
            lines = _of_topic(panels, self.topic)
        elif self.topic == "all" or not self.example or len(whole) <= SCREEN_LINES:
            lines = whole
        else:
            lines = _short_page(self, panels, usage=usage, call=f"{ctx.command_path} {self.example}")
        formatter.write(_encodable("\n".join(lines) + "\n"))


class HelpPageGroup(TyperGroup):
    """A command group with panels in its help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        panels: _Panels = {}
        for name, member in self.commands.items():
            assert isinstance(member, TyperCommand)
            panels.setdefault(member.rich_help_panel or "Commands", []).append((name, member.short_help or ""))
        usage = f"{ctx.command_path} COMMAND [--FLAG VALUE]... | --version | --install-completion"
        lines = _page(self, panels, usage=usage)
        formatter.write(_encodable("\n".join(lines) + "\n"))


def _topic_of(args: list[str]) -> str:
    """Remove the word after --help from the arguments, and return it."""
    place = next((number for number, word in enumerate(args) if word in HELP_FLAGS), len(args)) + 1
    return args.pop(place) if place < len(args) and not args[place].startswith("-") else ""


def _panels_of(command: TyperCommand, ctx: Any) -> _Panels:
    panels: _Panels = {"Options": []}
    for option in command.get_params(ctx):
        if isinstance(option, typer.core.TyperOption) and not option.hidden:
            rows = panels.setdefault(option.rich_help_panel or "Options", [])
            rows.append((", ".join(sorted(option.opts, key=len, reverse=True)), option.help or ""))
    return panels


def _page(command: TyperCommand | TyperGroup, panels: _Panels, *, usage: str) -> list[str]:
    """Return the lines of the whole help page, at terminal width."""
    return [*_head(command, usage), *_framed_panels(panels)]


def _head(command: TyperCommand | TyperGroup, usage: str) -> list[str]:
    paragraphs = [" ".join(text.split()) for text in (command.help or "").split("\n\n")]
    return [_bold(f"Usage: {usage}"), "", *(line for text in paragraphs for line in [*wrap(text, _width()), ""])]


def _short_page(command: HelpPageCommand, panels: _Panels, *, usage: str, call: str) -> list[str]:
    """Return the lines of a help page with an example, its flags, and the topics."""
    texts = {name: text for title, rows in panels.items() if title != "Options" for name, text in rows}
    named = [*re.findall(r"--\w+", call), "--load_checkpoint"]
    main = [(name, _brief(texts[name])) for name in named if name in texts]
    example = _wrapped_call(call)
    num_flags = sum(map(len, panels.values()))
    path = usage.partition(" [")[0]
    more = (
        f"{path} --help all lists all {num_flags} flags, --help WORD those of a topic or with this word in their name."
    )
    return [
        *_head(command, usage),
        *[f"{line} \\" for line in example[:-1]],
        example[-1],
        "",
        *_framed_panels({"Main flags": main} | {title: panels[title] for title in panels if title in command.outside}),
        *wrap(more, _width()),
        *wrap(f"Topics: {_topics(panels)}", _width()),
    ]


def _wrapped_call(call: str) -> list[str]:
    """Return the lines of a call. Each value is on the line of its flag."""
    parts = re.sub(r" (?=--)", "\n", call).split("\n")
    lines = parts[:1]
    for part in parts[1:]:
        # Two columns for the backslash at the end.
        if len(lines[-1]) + len(part) + 3 <= _width():
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    return lines


def _of_topic(panels: _Panels, topic: str) -> list[str]:
    """Return the panels of a topic. Without one of this name, the flags with this word in their name.

    Raises:
        UsageError: there is neither.
    """
    wanted = topic.lower().removeprefix("--").replace("-", "_")
    found = {title: rows for title, rows in panels.items() if _slug(title) == wanted}
    found = found or {title: rows for title, rows in panels.items() if wanted in re.findall(r"\w+", title.lower())}
    if not found:
        by_name = {title: [row for row in rows if wanted in row[0]] for title, rows in panels.items()}
        found = {title: rows for title, rows in by_name.items() if rows}
    if not found:
        raise UsageError(f"--help {topic}: neither a topic nor part of a flag; the topics are {_topics(panels)}")
    return _framed_panels(found)


def _topics(panels: _Panels) -> str:
    return ", ".join(_slug(title) for title in panels if title != "Options")


def _slug(title: str) -> str:
    """Return the topic of a panel, as it is typed: "Reward model" is reward_model, "Adapter (LoRA)" is adapter."""
    return title.partition(" (")[0].lower().replace(" ", "_")


def _brief(text: str) -> str:
    """Return the start of a flag's help text, with its default."""
    sentences, _, values = text.rpartition(" (")
    default = values.rstrip(")").rpartition("; ")[2]
    start = re.split(r"[.;] ", sentences)[0].rstrip(".")
    return f"{start} ({default})" if default.startswith(("default", "required")) else start


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, _MIN_WIDTH), _MAX_WIDTH)


def _framed_panels(panels: _Panels) -> list[str]:
    width, lines = _width(), list[str]()
    for title, rows in panels.items():
        left, right = "├┤" if lines else "╭╮"
        lines.append(f"{left}─ {_bold(title)} {'─' * (width - len(title) - 5)}{right}")
        lines += _rows(rows, width - 4)
    return [*lines, f"╰{'─' * (width - 2)}╯"]


def _rows(rows: list[_Row], inner: int) -> list[str]:
    left = min(max(len(name) for name, _ in rows), _MAX_NAME)
    lines = []
    for name, text in rows:
        body = wrap(text, inner - left - 2) or [""]
        if len(name) > left:
            lines.append(_framed(_cyan(name), len(name), inner))
            name = ""
        for number, line in enumerate(body):
            shown = name if number == 0 else ""
            content = _cyan(shown) + " " * (left - len(shown) + 2) + line
            lines.append(_framed(content, left + 2 + len(line), inner))
    return lines


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
        return text.translate(str.maketrans("╭╮╰╯├┤─│", "++++++-|")).encode("ascii", "replace").decode()
    return text
