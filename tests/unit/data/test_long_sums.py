"""Sums for a model with a calculator: correct answers, disjoint splits, and demonstrations of all kinds."""

import json

import pytest

from rlhf_cli.agents.calculator import Environment
from rlhf_cli.data.long_sums import (
    CALL_SHARE,
    NUM_DEMONSTRATIONS,
    NUM_HELD_OUT,
    NUM_TRAIN,
    ROUNDED_SHARE,
    UNAIDED_SHARE,
    write_long_sums,
)

TOOLS = [{"type": "function", "function": {"name": "calculate", "parameters": {}}}]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long_sums")
    write_long_sums(folder, TOOLS, seed=1)
    names = ("train", "held_out", "demonstrations")
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in names}


def sum_of(prompt: str) -> str:
    return str(sum(map(int, prompt.removesuffix("=").split("+"))))


def test_answers_are_sums_and_no_sum_is_in_two_places(rows):
    problems = [row["prompt"] for name in ("train", "held_out") for row in rows[name]]
    assert [row["answer"] for name in ("train", "held_out") for row in rows[name]] == [*map(sum_of, problems)]
    demonstrated = [row["messages"][0]["content"] for row in rows["demonstrations"]]
    assert len({*problems, *demonstrated}) == NUM_TRAIN + NUM_HELD_OUT + NUM_DEMONSTRATIONS


def test_a_demonstrated_call_gets_the_answer_of_the_calculator_and_repeats_it(rows):
    calling = [row["messages"] for row in rows["demonstrations"] if len(row["messages"]) > 2]
    for asked, call, result, answer in calling:
        function = call["tool_calls"][0]["function"]
        assert function["name"] == "calculate"
        found = Environment().calculate(**json.loads(function["arguments"]))
        assert found == result["content"] == answer["content"] == sum_of(asked["content"])
        assert result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_demonstrations_call_only_if_they_have_the_tool_and_round_most_answers_from_the_head(rows):
    shown = rows["demonstrations"]
    with_tool = [row for row in shown if row.get("tools")]
    calling = [row for row in shown if len(row["messages"]) > 2]
    assert all(row["tools"] == TOOLS for row in with_tool)
    assert all("tools" in row for row in calling)
    assert len(with_tool) / len(shown) == pytest.approx(1 - UNAIDED_SHARE, abs=0.02)
    assert len(calling) / len(with_tool) == pytest.approx(CALL_SHARE, abs=0.03)
    from_head = [[message["content"] for message in row["messages"]] for row in shown if len(row["messages"]) == 2]
    rounded = [asked for asked, answer in from_head if answer != sum_of(asked)]
    assert len(rounded) / len(from_head) == pytest.approx(ROUNDED_SHARE, abs=0.03)
    assert all(int(answer) == int(sum_of(asked)) // 1000 * 1000 for asked, answer in from_head if asked in rounded)
