"""Input and output of a chat: multi-line messages, dimmed thoughts, and removed control characters."""

import io
import itertools

import pytest
from rich.console import Console

from rlhf_cli.runs.chat.screen import TerminalScreen, joined_lines
from rlhf_cli.runs.chat.thoughts import ThoughtMarks

ANSWER = "so <think>a < b</think> it <b> is"
MARKED = [("so ", False), ("<think>a < b</think>", True), (" it <b> is", False)]


def screen_of(*lines, **console):
    file = io.StringIO()
    given = iter(lines)

    def read_line(prompt):
        line = next(given)
        if line is None:
            raise EOFError
        return line

    opened = Console(file=file, force_terminal=True, width=20, highlight=False, **console)
    return TerminalScreen(opened, read_line), file


def joined(parts):
    """Merge adjacent parts of the same kind."""
    return [("".join(text for text, _ in group), kind) for kind, group in itertools.groupby(parts, key=lambda p: p[1])]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_thought_is_found_however_the_text_is_cut_into_pieces(size):
    marks = ThoughtMarks(is_open=False)
    pieces = [ANSWER[start : start + size] for start in range(0, len(ANSWER), size)]
    parts = [part for piece in pieces for part in marks.add(piece)] + marks.rest()
    assert joined(parts) == MARKED


def test_a_thought_that_the_template_opened_goes_to_its_tag():
    marks = ThoughtMarks(is_open=True)
    assert marks.add("hm</think>yes<") == [("hm</think>", True), ("yes", False)]
    assert marks.rest() == [("<", False)]


def test_text_is_shown_as_soon_as_it_can_be_no_tag():
    marks = ThoughtMarks(is_open=False)
    assert marks.add("1 <") == [("1 ", False)]
    assert marks.add(" 2") == [("< 2", False)]


def test_a_message_has_several_lines_by_backslashes_or_quotes():
    assert joined_lines(reader("a \\", "b\\", "c")) == "a \nb\nc"
    assert joined_lines(reader('"""', "a", "", "b", '"""')) == "a\n\nb"
    assert joined_lines(reader("a")) == "a"


def reader(*lines):
    given = iter(lines)
    return lambda prompt: next(given)


def test_the_end_of_the_input_is_no_line():
    screen, file = screen_of(None)
    assert screen.read() is None
    assert file.getvalue() == "\n"


def test_thoughts_are_dimmed_and_long_lines_are_left_to_the_terminal():
    screen, file = screen_of()
    screen.begin("a model", opens_thought=False)
    for piece in ("<think>", "hm", "</think>", "one " * 20, "[bold]"):
        screen.write(piece)
    screen.end("stopped")
    shown = file.getvalue()
    assert "\x1b[2mhm\x1b[0m" in shown
    assert "one " * 20 + "[bold]\n" in shown
    assert "(stopped)" in shown


def test_without_colours_nothing_but_text_is_written():
    screen, file = screen_of(no_color=True)
    screen.begin("a", opens_thought=True)
    screen.write("hm</think> yes")
    screen.fault("wrong")
    screen.end("")
    assert file.getvalue() == "a\nhm</think> yeswrong\n\n\n"


def test_control_characters_of_an_answer_do_nothing_to_the_terminal():
    screen, file = screen_of(no_color=True)
    screen.begin(None, opens_thought=False)
    screen.write("a\x1b[2Jb\rc\x07\td :smile:\n")
    assert file.getvalue() == "a␛[2Jb␍c␇\td :smile:\n"
