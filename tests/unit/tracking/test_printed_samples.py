"""Lines of --print_samples: which responses, within the width, and without control characters."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.tracking.terminal.printed_samples import sample_lines, shortened
from rlhf_cli.tracking.tracker import Tracker


def row(number: int, **values: object) -> dict[str, object]:
    named = {"id": f"d.jsonl:{number}/0.0@3", "prompt": f"prompt {number}", "response": f"response {number}"}
    return {**named, "reward": 0.5, "advantage": -1.25, "length": 7, "verdict": "wrong", **values}


def test_a_response_has_its_id_numbers_prompt_and_text():
    assert list(sample_lines([row(4)], 1, cells=80)) == [
        "d.jsonl:4/0.0@3  reward 0.5000  advantage -1.250  length 7  wrong",
        "  prompt    prompt 4",
        "  response  response 4",
    ]


@pytest.mark.parametrize(("number", "shown"), [(0, []), (1, [0]), (3, [0, 2, 5]), (9, list(range(8)))])
def test_responses_are_spread_over_the_iteration(number: int, shown: list[int]):
    heads = list(sample_lines([row(index) for index in range(8)], number, cells=80))[::3]
    assert [head.split("  ")[0] for head in heads] == [f"d.jsonl:{index}/0.0@3" for index in shown]


def test_missing_numbers_are_named_and_absent_ones_left_out():
    values = row(1, reward=None, advantage=None, verdict=None, finish_reason="length")
    assert next(sample_lines([values], 1, cells=80)).endswith("reward none  advantage none  length 7  length")
    del values["advantage"]
    assert "advantage" not in next(sample_lines([values], 1, cells=80))


def test_messages_and_control_characters_are_plain_text():
    dialogue = [{"role": "user", "content": "2 + 2 = é?"}]
    lines = list(sample_lines([row(1, prompt=dialogue, response="one\ntwo \x1b[31mred\x9b")], 1, cells=80))
    assert lines[1] == '  prompt    [{"role": "user", "content": "2 + 2 = é?"}]'
    assert lines[2] == "  response  one⏎two �[31mred�"


@pytest.mark.parametrize(
    ("text", "cells", "short"),
    [
        ("0123456789", 10, "0123456789"),
        ("0123456789", 9, "012 … 789"),
        ("0123456789", 8, "012 … 89"),
        ("日本語日本語", 9, "日  …  語"),
        ("0123456789", 2, " …"),
    ],
)
def test_the_middle_of_a_long_text_is_left_out(text: str, cells: int, short: str):
    assert shortened(text, cells) == short
    assert cell_len(short) <= cells


def printed(tmp_path, console: Console) -> list[str]:
    config = TrackingConfig(use_tensorboard=False, print_samples=1)
    tracker = Tracker(config, tmp_path, command="ppo", total_steps=1, console=console, resume_step=None)
    tracker.samples(1, [row(1, response="x" * 2000)])
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_terminal_limits_lines_to_its_width_and_a_log_to_500_characters(tmp_path):
    wide = printed(tmp_path, Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None))
    assert [len(line) for line in wide] == [59, 20, 59]
    assert wide[2].startswith("  response  xxx")
    log = printed(tmp_path, Console(file=io.StringIO(), width=60, soft_wrap=True))
    assert [len(line) for line in log] == [65, 20, 500]
