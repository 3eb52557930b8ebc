"""An episode for people, played by one of them at a terminal or by a script, before any model is trained."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from rlhf_cli.errors import RunError
from rlhf_cli.runs.chat.screen import joined_lines
from rlhf_cli.runs.data_view import FAINT, LEFT_OUT, Page, visible
from rlhf_cli.runs.episode_preview import Author, PlayedEpisode, Rehearsal

HINT = (
    'You write the turns of the model: a line each, or several lines between two lines of """. The end of a turn is '
    "added. Ctrl-D ends the episode."
)

LineReader = Callable[[str], str]
"""Returns the line that a person types behind a prompt. Raises EOFError at the end."""


def line_reader(console: Console, *, has_script: bool) -> LineReader | None:
    """Return a reader of typed lines; None with a script, or if no person is at a terminal."""
    if has_script or not console.is_terminal or not sys.stdin.isatty():
        return None
    import readline  # noqa: F401 - gives `input` a line editor

    return input


def show_episode(
    rehearsal: Rehearsal,
    console: Console,
    *,
    special_tokens: Sequence[str],
    read_line: LineReader | None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Play the episode and print it, with the typed turns of `read_line` if it is given, else with its script.

    `environment` is the terminal's, which names its way to draw pictures.

    Raises:
        RunError: the environment failed; the episode has been printed.
    """
    page = Page(console, special_tokens, environment)
    page.heading(f"Episode with {rehearsal.about}")
    page.line(Text(f"first prompt: {rehearsal.where}", FAINT), indent=2, hanging=2)
    if read_line is None:
        played = rehearsal.play_script()
        parts = played.example.parts
    else:
        played = rehearsal.play(_typed(rehearsal, page, read_line))
        parts = played.example.parts[1:]  # the prompt has been shown
    page.legend()
    for part in parts:
        page.part(part)
    _print_facts(played, page)
    if played.failure is not None:
        raise RunError(f"the environment {played.failure}")


def _typed(rehearsal: Rehearsal, page: Page, read_line: LineReader) -> Author:
    """Return an author who shows the new tokens to a person and returns the turn that the person types."""

    def turn(token_ids: Sequence[int], start: int) -> str | None:
        page.line()
        page.part(rehearsal.part(token_ids, start))
        if not start:
            _print_hints(rehearsal, page)
        page.line()
        try:
            while not (text := joined_lines(read_line)).strip():
                pass
        except EOFError:
            page.line()
            return None
        return text

    return turn


def _print_hints(rehearsal: Rehearsal, page: Page) -> None:
    page.line()
    page.line(Text(HINT, FAINT), indent=2)
    for call in rehearsal.example_calls:
        page.line(Text("A call, with made-up arguments:", FAINT), indent=2)
        page.line(Text(visible(call), FAINT), indent=4)


def _print_facts(played: PlayedEpisode, page: Page) -> None:
    """Print the reward, the counts and the end of an episode, and the traceback of an environment that failed."""
    page.line()
    page.facts(played.example.facts)
    if played.trace:
        page.line()
        page.line(Text(visible(played.trace.rstrip()), LEFT_OUT), indent=2)
    page.line()
