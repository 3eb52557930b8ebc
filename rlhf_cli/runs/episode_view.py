"""Plays and prints an episode before training, with turns typed at the terminal or read from a script."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from rlhf_cli.errors import RunError
from rlhf_cli.runs.chat.screen import joined_lines
from rlhf_cli.runs.data_view import FAINT, LEFT_OUT, Page, visible
from rlhf_cli.runs.episode_preview import Author, PlayedEpisode, Rehearsal

_HINT = (
    'Type the model\'s turns, one per line, or multiple lines between two lines with """. The end-of-turn token is '
    "added. Ctrl-D ends the episode."
)

LineReader = Callable[[str], str]
"""Shows a prompt and returns the typed line. Raises EOFError at the end."""


def line_reader(console: Console, *, has_script: bool) -> LineReader | None:
    """Return a function that reads typed lines; None with a script, or without an interactive terminal."""
    if has_script or not console.is_terminal or not sys.stdin.isatty():
        return None
    # The import enables line editing in `input`.
    import readline  # noqa: F401

    return input


def show_episode(
    rehearsal: Rehearsal,
    console: Console,
    *,
    special_tokens: Sequence[str],
    read_line: LineReader | None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Play and print the episode, with turns from `read_line` if set, otherwise from the script.

    `environment` contains the terminal's variables, which select the image protocol.

    Raises:
        RunError: the environment failed. The episode is printed first.
    """
    page = Page(console, special_tokens, environment)
    page.heading(f"Episode with {rehearsal.about}")
    page.line(Text(f"first prompt: {rehearsal.where}", FAINT), indent=2, hanging=2)
    if read_line is None:
        played = rehearsal.play_script()
        parts = played.example.parts
    else:
        played = rehearsal.play(_typed(rehearsal, page, read_line))
        # The prompt was already shown before the first turn.
        parts = played.example.parts[1:]
    page.legend()
    for part in parts:
        page.part(part)
    _print_facts(played, page)
    if played.failure is not None:
        raise RunError(f"the environment {played.failure}")


def _typed(rehearsal: Rehearsal, page: Page, read_line: LineReader) -> Author:
    """Return an author that shows the new tokens to the user and returns the typed turn."""

    def turn(token_ids: Sequence[int], start: int) -> str | None:
        page.line()
        page.part(rehearsal.part(token_ids, start))
        if not start:
            _print_hints(rehearsal, page)
        page.line()
        try:
            # An empty line is not a turn: a model always samples at least one token.
            while not (text := joined_lines(read_line)).strip():
                pass
        except EOFError:
            page.line()
            return None
        return text

    return turn


def _print_hints(rehearsal: Rehearsal, page: Page) -> None:
    page.line()
    page.line(Text(_HINT, FAINT), indent=2)
    for call in rehearsal.example_calls:
        page.line(Text("Sample call:", FAINT), indent=2)
        page.line(Text(visible(call), FAINT), indent=4)


def _print_facts(played: PlayedEpisode, page: Page) -> None:
    """Print reward, counts and end of the episode, and the traceback if the environment failed."""
    page.line()
    page.facts(played.example.facts)
    if played.trace:
        page.line()
        page.line(Text(visible(played.trace.rstrip()), LEFT_OUT), indent=2)
    page.line()
