"""Images in a terminal: half block colours, image protocols, and unsupported consoles."""

import base64
import io
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from rlhf_cli.tracking.terminal.pictures import cells_for, draws_pictures, escape_of, print_picture

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
NOISE = np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8)
KITTY, ITERM = {"TERM": "xterm-kitty"}, {"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}


def printed(pixels: Any, environment: dict[str, str], **console: Any) -> str:
    file = io.StringIO()
    given = {"force_terminal": True, "color_system": "truecolor", "width": 80, **console}
    print_picture(np.array(pixels, dtype=np.uint8), Console(file=file, **given), environment, indent=2)
    return file.getvalue()


def test_a_half_block_has_the_pixel_above_in_front_of_the_pixel_below() -> None:
    text = printed([[RED, GREEN], [BLUE, RED], [GREEN, BLUE]], {})
    first, second = text.splitlines()
    cell = "\x1b[38;2;{};48;2;{}m▀\x1b[0m".format
    assert first == "  " + cell("255;0;0", "0;0;255") + cell("0;255;0", "255;0;0")
    assert second == "  \x1b[38;2;0;255;0m▀\x1b[0m\x1b[38;2;0;0;255m▀\x1b[0m"


def test_a_picture_is_shrunk_into_the_terminal_and_never_enlarged() -> None:
    assert cells_for(2, 3, most_columns=80) == (3, 2)
    assert cells_for(480, 640, most_columns=200) == (48, 36)
    assert cells_for(480, 640, most_columns=20) == (20, 15)
    assert cells_for(1000, 10, most_columns=80) == (1, 36)
    lines = printed(NOISE, {}, width=22).splitlines()
    assert [line.count("▀") for line in lines] == [20] * 7  # 80 of 120 parts of 20 columns: 13 pixels in 7 lines


def test_kitty_gets_the_picture_in_chunks_and_is_not_to_answer() -> None:
    text = printed(NOISE, KITTY)
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", text)
    assert "".join(f"\x1b_G{keys};{part}\x1b\\" for keys, part in parts) == text.strip()
    assert parts[0][0] == "a=T,f=100,q=2,c=48,r=16,m=1"
    assert [keys for keys, _ in parts[1:]] == ["m=1"] * (len(parts) - 2) + ["m=0"]
    assert all(len(part) == 4096 for _, part in parts[:-1])
    png = base64.b64decode("".join(part for _, part in parts))
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(png))), NOISE)


def test_iterm_gets_the_picture_in_one_sequence() -> None:
    found = re.fullmatch(
        r"  \x1b\]1337;File=inline=1;size=(\d+);width=48;height=16;preserveAspectRatio=1:(.*)\x07\n",
        printed(NOISE, ITERM),
    )
    assert found is not None
    png = base64.b64decode(found[2])
    assert len(png) == int(found[1])
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(png))), NOISE)


@pytest.mark.parametrize(
    "environment",
    [
        {"TERM": "xterm-256color"},
        KITTY | {"TMUX": "/tmp/tmux"},
        ITERM | {"TERM": "screen-256color"},
        ITERM | {"STY": "1.pts"},
        {"TERM": "xterm-256color", "TERM_PROGRAM": "vscode", "KITTY_WINDOW_ID": "1"},
    ],
)
def test_a_terminal_that_may_not_know_a_protocol_gets_no_sequence_of_it(environment: dict[str, str]) -> None:
    assert escape_of(NOISE, environment, columns=4, rows=4) is None
    assert "▀" in printed(NOISE, environment)


def test_files_pipes_and_terminals_without_colours_draw_no_pictures() -> None:
    for settings in ({"force_terminal": False}, {"force_terminal": True, "no_color": True}, {"color_system": None}):
        assert not draws_pictures(Console(file=io.StringIO(), **settings))  # type: ignore[arg-type]
    assert draws_pictures(Console(file=io.StringIO(), force_terminal=True, color_system="truecolor"))
