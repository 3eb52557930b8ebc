"""Responses that `rlhf generate` selects, and that the training commands read them correctly."""

import json
from collections import Counter

import pytest

from rlhf_cli.config.generate import AnswersOutputConfig
from rlhf_cli.data.formats.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.formats.preference import PairColumns, choose_pair_format
from rlhf_cli.data.formats.table import choose_format
from rlhf_cli.data.reading.columns import Columns
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.data.selection import prompt_cells, select_samples, summary, write_rows


def sample(response, score=0.0, *, group=0, prompt="What?", cut=False, failed=False, **cells):
    return {
        "group": group,
        "prompt": prompt,
        "response": response,
        "reward": None if failed else score,
        "verdict": "failed" if failed else "scored",
        "finish_reason": "length" if cut else "stop",
        **cells,
    }


def select(samples, name="best", min_score=None):
    counts: Counter[str] = Counter()
    rows = list(select_samples(samples, AnswersOutputConfig(select=name, min_score=min_score), counts))
    return rows, {reason: count for reason, count in counts.items() if count}


def test_the_best_response_is_the_first_of_the_highest_score():
    rows, counts = select([sample("a", 1.0), sample("b", 2.0), sample("c", 2.0), sample("d", 3.0, group=1)])
    assert rows == [
        {"prompt": "What?", "response": "b", "score": 2.0},
        {"prompt": "What?", "response": "d", "score": 3.0},
    ]
    assert counts == {"prompts": 2, "rows": 2}


def test_failed_empty_cut_and_low_responses_are_left_out_and_counted():
    samples = [
        sample("failed", failed=True),
        sample(" \n", 9.0),
        sample("cut", 9.0, cut=True),
        sample("low", 0.5),
        sample("good", 1.0),
        sample("lost", 0.0, group=1),
    ]
    rows, counts = select(samples, min_score=1.0)
    assert [row["response"] for row in rows] == ["good"]
    assert counts == {"prompts": 2, "rows": 1, "failed": 1, "empty": 1, "truncated": 1, "low": 2, "without": 1}


def test_all_keeps_different_texts_in_their_order():
    samples = [sample("a", 1.0), sample("b", 1.0), sample(" a\n", 1.0), sample("c", 0.0)]
    rows, counts = select(samples, "all", min_score=1.0)
    assert [row["response"] for row in rows] == ["a", "b"]
    assert counts == {"prompts": 1, "rows": 2, "repeated": 1, "low": 1}


def test_all_needs_no_scores():
    unscored = {"group": 0, "prompt": "What?", "response": "a", "finish_reason": "stop"}
    assert select([unscored], "all")[0] == [{"prompt": "What?", "response": "a"}]


def test_best_is_paired_with_worst_and_the_margin_is_what_lies_between():
    rows, _ = select([sample("middle", 1.0), sample("worst", -0.5, cut=True), sample("best", 2.0)], "best_worst")
    assert rows == [{"prompt": "What?", "chosen": "best", "rejected": "worst", "margin": 2.5}]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([sample("a", 1.0), sample("b", 1.0)], "equal"),
        ([sample("a", 1.0), sample("a ", 0.0)], "repeated"),
        ([sample("a", 1.0)], "without"),
        ([sample("a", 1.0, cut=True), sample("b", 0.0, cut=True)], "without"),
    ],
)
def test_prompts_that_give_no_pair_are_counted_with_the_reason(samples, reason):
    rows, counts = select(samples, "best_worst")
    assert rows == []
    assert counts[reason] == 1


def test_a_pair_needs_a_chosen_response_of_the_least_score():
    samples = [sample("a", 1.0), sample("b", 0.0)]
    assert len(select(samples, "best_worst", min_score=1.0)[0]) == 1
    assert select(samples, "best_worst", min_score=1.5)[1]["without"] == 1


def test_selection_reads_one_prompt_at_a_time():
    read = []

    def samples():
        for index in range(3):
            read.append(index)
            yield sample(str(index), group=index)

    rows = iter(select_samples(samples(), AnswersOutputConfig(select="best"), Counter()))
    next(rows)
    assert read == [0, 1]


def test_a_summary_says_what_was_left_out_and_why():
    counts = Counter(prompts=1000, rows=812, failed=20, equal=0)
    assert summary(counts) == "812 rows of 1,000 prompts; left out: 20 failed rewards"


MESSAGES = (Message("system", "Be brief."), Message("user", "What?"))
CALL = (
    Message("user", "Weather?"),
    Message("assistant", "", (ToolCall("look", {"at": "sky"}, "c1"),)),
    Message("tool", "blue", tool_call_id="c1", name="look"),
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CONVERSATIONS = [
    Conversation((Message("user", "What?"),)),
    Conversation(MESSAGES),
    Conversation(CALL, (TOOL,)),
    Conversation((Message("user", "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bye"),)),
]


def source_of(tmp_path, rows):
    write_rows(tmp_path / "selected.jsonl", rows)
    rows = load_rows(str(tmp_path / "selected.jsonl"), split="train", seed=0)
    return rows.sources[0], rows


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("worse", ["bad", "\n\nHuman: it goes on"])
def test_pairs_are_read_as_preferences_with_the_prompt_that_was_asked(tmp_path, conversation, worse):
    samples = [sample(text, score, **prompt_cells(conversation)) for text, score in (("good", 1.0), (worse, 0.0))]
    source, rows = source_of(tmp_path, select(json.loads(json.dumps(samples)), "best_worst")[0])
    pair = choose_pair_format(source, PairColumns(None), data_format="auto").read(rows[0])
    assert pair.prompt == conversation.messages
    assert (pair.chosen, pair.rejected) == ((Message("assistant", "good"),), (Message("assistant", worse),))
    assert (pair.margin, pair.tools) == (1.0, conversation.tools)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_best_responses_are_read_as_examples_of_the_prompt_that_was_asked(tmp_path, conversation):
    source, rows = source_of(tmp_path, select([sample("good", 1.0, **prompt_cells(conversation))])[0])
    example = choose_format(source, Columns(None), data_format="auto").read(rows[0])
    assert example == Conversation((*conversation.messages, Message("assistant", "good")), conversation.tools)
