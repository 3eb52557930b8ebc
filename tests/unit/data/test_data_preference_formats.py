"""Conversion of rows to preference pairs and labelled responses, and error messages for other rows."""

import json

import pytest

from rlhf_cli.data.formats.conversations import Labelled, Message, Preference
from rlhf_cli.data.formats.preference import PairColumns, choose_labelled_format, choose_pair_format
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.errors import UsageError


def rows_of(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(str(path), split="train", seed=0)


def read_pairs(tmp_path, *rows, data_format="auto", **named):
    loaded = rows_of(tmp_path, *rows)
    columns = PairColumns(**{"input_key": None, **named})
    form = choose_pair_format(loaded.sources[0], columns, data_format=data_format)
    return form, [form.read(row) for row in loaded]


def read_labelled(tmp_path, *rows, data_format="auto", **named):
    loaded = rows_of(tmp_path, *rows)
    columns = PairColumns(**{"input_key": None, **named})
    form = choose_labelled_format(loaded.sources[0], columns, data_format=data_format)
    return form, [labelled for row in loaded for labelled in form.read(row)]


def turns(*texts):
    return tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))


def openai(*texts):
    return [{"role": message.role, "content": message.content} for message in turns(*texts)]


def sharegpt(*texts):
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


Q, A, B = Message("user", "Q"), Message("assistant", "A"), Message("assistant", "B")
S = Message("system", "S")
PAIR = Preference((Q,), (A,), (B,), None)
LATER = Preference(turns("Q", "x", "R"), (A,), (B,), None)
HH = "\n\nHuman: Q\n\nAssistant: x\n\nHuman: R\n\nAssistant:"

PAIRS = {
    "texts beside a prompt": ({"prompt": "Q", "chosen": "A", "rejected": "B"}, PAIR),
    "texts beside a question and a system message": (
        {"system": "S", "question": "Q", "chosen": "A", "rejected": "B"},
        Preference((S, Q), (A,), (B,), None),
    ),
    "texts beside messages": ({"prompt": openai("Q", "x", "R"), "chosen": "A", "rejected": "B"}, LATER),
    "texts beside an Alpaca prompt": (
        {"instruction": "Q", "input": "I", "chosen": "A", "rejected": "B"},
        Preference(turns("Q\n\nI"), (A,), (B,), None),
    ),
    "responses as messages beside a text": (
        {"prompt": "Q", "chosen": openai("", "A")[1:], "rejected": openai("", "B")[1:]},
        PAIR,
    ),
    "responses as messages beside messages": (
        {"prompt": openai("Q", "x", "R"), "chosen": openai("", "A")[1:], "rejected": openai("", "B")[1:]},
        LATER,
    ),
    "single messages beside ShareGPT": (
        {
            "conversations": sharegpt("Q", "x", "R"),
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
        LATER,
    ),
    "whole conversations": ({"chosen": openai("Q", "x", "R", "A"), "rejected": openai("Q", "x", "R", "B")}, LATER),
    "whole conversations of ShareGPT": (
        {"chosen": sharegpt("Q", "x", "R", "A"), "rejected": sharegpt("Q", "x", "R", "B")},
        LATER,
    ),
    "whole conversations beside their prompt": (
        {"prompt": "Q", "messages": openai("Q", "A"), "chosen": openai("Q", "A"), "rejected": openai("Q", "B")},
        PAIR,
    ),
    "whole conversations beside two columns that could be the prompt": (
        {"prompt": "Q", "question": "Q", "chosen": openai("Q", "A"), "rejected": openai("Q", "B")},
        PAIR,
    ),
    "whole conversations and a system message": (
        {"system": "S", "chosen": openai("Q", "A"), "rejected": openai("Q", "B")},
        Preference((S, Q), (A,), (B,), None),
    ),
    "whole conversations in the manner of hh": ({"chosen": HH + " A", "rejected": HH + " B"}, LATER),
    "prompt in the manner of hh": ({"prompt": HH, "chosen": " A", "rejected": " B"}, None),
    "sides that part before the last turn": (
        {"chosen": openai("Q", "x", "R", "A"), "rejected": openai("Q", "y", "T", "B")},
        Preference((Q,), turns("", "x", "R", "A")[1:], turns("", "y", "T", "B")[1:], None),
    ),
    "one side that goes on where the other ends": (
        {"chosen": openai("Q", "A"), "rejected": openai("Q", "A", "R", "B")},
        Preference((Q,), (A,), turns("", "A", "R", "B")[1:], None),
    ),
    "a whole margin": ({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": 2}, Preference((Q,), (A,), (B,), 2.0)),
    "a margin as text": (
        {"prompt": "Q", "chosen": "A", "rejected": "B", "margin": "-0.5"},
        Preference((Q,), (A,), (B,), -0.5),
    ),
    "an empty margin": ({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": ""}, PAIR),
    "scores, of which nothing is made": (
        {"prompt": "Q", "chosen": "A", "rejected": "B", "score_chosen": 9, "score_rejected": 1},
        PAIR,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_read_as_prompt_and_two_sides(name, tmp_path):
    row, expected = PAIRS[name]
    expected = expected or Preference(LATER.prompt, (Message("assistant", " A"),), (Message("assistant", " B"),), None)
    assert read_pairs(tmp_path, row)[1] == [expected]


@pytest.mark.parametrize("name", PAIRS)
def test_format_of_pairs_can_be_forced_and_rows_of_the_other_are_refused(name, tmp_path):
    row = PAIRS[name][0]
    form, pairs = read_pairs(tmp_path, row)
    forced, other = "explicit_prompt", "shared_prompt"
    if "->" not in form.columns:
        forced, other = other, forced
    assert read_pairs(tmp_path, row, data_format=forced)[1] == pairs
    with pytest.raises(
        UsageError, match=rf"rows are read as {other} \(--data_format\): it is a|column.* the prompt|be the prompt"
    ):
        read_pairs(tmp_path, row, data_format=other)


def test_pair_that_does_not_fit_the_forced_format_is_named_by_file_and_line(tmp_path):
    apart = {"prompt": "Q", "chosen": "A", "rejected": "B"}
    whole = {"prompt": "other", "chosen": openai("Q", "A"), "rejected": openai("Q", "B")}
    with pytest.raises(
        UsageError,
        match=r"rows\.jsonl line 2: column 'chosen' holds a conversation with its prompt, but rows are read as",
    ):
        read_pairs(tmp_path, apart, whole, data_format="explicit_prompt")
    for row, found in ((apart, "a str: 'A'"), (apart | {"chosen": openai("", "A")[1:]}, "a list: "), ({}, "missing")):
        with pytest.raises(
            UsageError,
            match=f"rows.jsonl line 2: column 'chosen' holds no conversation with its prompt, .* it is {found}",
        ):
            read_pairs(tmp_path, whole, row, data_format="shared_prompt")
    with pytest.raises(UsageError, match=r"no column for the prompt \(prompt, .*--input_key"):
        read_pairs(tmp_path, {"chosen": "A", "rejected": "B"}, data_format="explicit_prompt")


def test_columns_of_pairs_can_be_named(tmp_path):
    row = {"q": "Q", "good": "A", "bad": "B", "prompt": "x", "chosen": "y", "rejected": "z", "margin": 1}
    form, pairs = read_pairs(tmp_path, row, input_key="q", chosen_key="good", rejected_key="bad")
    assert pairs == [Preference((Q,), (A,), (B,), 1.0)]
    assert form.columns == "q -> good, bad, margin margin"


def test_context_and_system_message_that_appear_late_are_read(tmp_path):
    row = {"instruction": "Q", "chosen": "A", "rejected": "B"}
    pairs = read_pairs(tmp_path, *[row] * 100, row | {"input": "I", "system": "S"})[1]
    assert pairs[-1] == Preference((S, *turns("Q\n\nI")), (A,), (B,), None)


def test_tools_of_a_row_go_with_both_sides(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    (pair,) = read_pairs(tmp_path, {"prompt": "Q", "chosen": "A", "rejected": "B", "tools": [tool]})[1]
    assert pair.tools == (tool,)


UNFIT_PAIRS = {
    "no chosen": (
        {"prompt": "Q", "rejected": "B"},
        {},
        "no column for the chosen response .*--chosen_key.*: prompt, rej",
    ),
    "no rejected": ({"prompt": "Q", "chosen": "A"}, {}, "no column for the rejected response .*--rejected_key"),
    "chosen_key missing": (
        {"chosen": "A", "rejected": "B"},
        {"chosen_key": "good"},
        r"no column 'good' \(--chosen_key\)",
    ),
    "two prompts": (
        {"prompt": "Q", "question": "Q", "chosen": "A", "rejected": "B"},
        {},
        "prompt and question could all be the prompt: choose one with --input_key",
    ),
}


UNREAD_PROMPT = r"contain full conversations, whose prompt would replace 'ctx' \(--input_key\): remove it"


def test_named_prompt_beside_whole_conversations_is_refused(tmp_path):
    sides = {"chosen": openai("Q", "A"), "rejected": openai("Q", "B")}
    with pytest.raises(UsageError, match=f"chosen and rejected {UNREAD_PROMPT}"):
        read_pairs(tmp_path, sides | {"ctx": "C"}, input_key="ctx")
    with pytest.raises(UsageError, match=f"completion {UNREAD_PROMPT}"):
        read_labelled(tmp_path, {"ctx": "C", "completion": openai("Q", "A"), "label": True}, input_key="ctx")


@pytest.mark.parametrize("name", UNFIT_PAIRS)
def test_columns_that_hold_no_pairs_are_named(name, tmp_path):
    row, named, reason = UNFIT_PAIRS[name]
    with pytest.raises(UsageError, match=reason) as caught:
        read_pairs(tmp_path, row, **named)
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl: ")


GOOD = {"prompt": "Q", "chosen": "A", "rejected": "B"}
UNWEIGHED = [openai("Q", "A")[0], openai("Q", "A")[1] | {"weight": 0}]
BAD_PAIRS = {
    "weight 0": (
        {"chosen": UNWEIGHED, "rejected": openai("Q", "B")},
        "chosen: an assistant turn is marked: this marker excludes text",
    ),
    "weight 0 beside a prompt": (
        GOOD | {"rejected": UNWEIGHED[1] | {"content": "B"}},
        "rejected: an assistant turn is marked: this marker excludes text",
    ),
    "identical sides": (GOOD | {"rejected": "A"}, "chosen and rejected are equal"),
    "identical conversations": (
        {"chosen": openai("Q", "A"), "rejected": openai("Q", "A")},
        "chosen and rejected are equal",
    ),
    "empty response": (GOOD | {"rejected": " \n"}, "rejected: the response is empty"),
    "null response": (GOOD | {"chosen": None}, "column 'chosen' is not text but null"),
    "missing response": ({"prompt": "Q", "chosen": "A"}, "column 'rejected' is not text but missing; columns present"),
    "empty list": (GOOD | {"chosen": []}, r"column 'chosen' is not text but a list: \[\]"),
    "null prompt": (GOOD | {"prompt": None}, "column 'prompt' is not text but null"),
    "prompt with its answer": (
        GOOD | {"prompt": openai("Q", "A")},
        "a prompt ends with a user turn, this one with assistant",
    ),
    "ends with the user": (
        {"chosen": openai("Q", "A", "R"), "rejected": openai("Q", "B")},
        "chosen: the conversation ends with user, expected an assistant turn at its end",
    ),
    "no answer": (
        {"chosen": openai("Q"), "rejected": openai("Q", "B")},
        "chosen: the conversation has no assistant turn",
    ),
    "roles out of order": (
        {"chosen": [*openai("Q", "A"), {"role": "assistant", "content": "A"}], "rejected": openai("Q", "B")},
        "chosen: message 3 is from assistant after assistant, expected user or tool",
    ),
    "no common prompt": (
        {"chosen": openai("Q", "A"), "rejected": openai("R", "B")},
        "chosen and rejected have no common prompt: they start with different questions",
    ),
    "only a system message in common": (
        {
            "chosen": [{"role": "system", "content": "S"}, *openai("Q", "A")],
            "rejected": [{"role": "system", "content": "S"}, *openai("R", "B")],
        },
        "chosen and rejected have no common prompt",
    ),
    "margin that is no number": (GOOD | {"margin": "much"}, "column 'margin' is not a number but a str: 'much'"),
    "margin that is a truth": (GOOD | {"margin": True}, "column 'margin' is not a number but a bool: True"),
    "infinite margin": (GOOD | {"margin": "inf"}, "column 'margin' is not a number"),
    "asked for in the manner of hh, without a response": (
        {"chosen": HH, "rejected": HH + " B"},
        "chosen: the response is empty",
    ),
    "two Assistants in the manner of hh": (
        {"chosen": HH + " A\n\nAssistant: A", "rejected": HH + " B"},
        "chosen: message 5 is from assistant after assistant",
    ),
}


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_bad_pair_is_named_by_file_and_line(name, tmp_path):
    row, reason = BAD_PAIRS[name]
    with pytest.raises(UsageError, match=reason) as caught:
        read_pairs(tmp_path, GOOD, row)
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl line 2: ")


def test_weight_of_a_turn_that_both_sides_share_is_none_that_is_trained(tmp_path):
    shared = UNWEIGHED + openai("R")
    (pair,) = read_pairs(tmp_path, {"prompt": shared, "chosen": "A", "rejected": "B"})[1]
    assert pair == Preference(turns("Q", "A", "R"), (A,), (B,), None)
    (labelled,) = read_labelled(tmp_path, {"prompt": shared, "response": "A", "label": 1})[1]
    assert labelled.prompt == turns("Q", "A", "R")


def test_response_without_any_prompt_is_told_where_to_put_it(tmp_path):
    with pytest.raises(
        UsageError, match=r"line 1: no prompt: a single response requires a prompt column .*--input_key"
    ):
        read_pairs(tmp_path, {"chosen": "A", "rejected": "B"})


GOOD_ONE, BAD_ONE = Labelled((Q,), (A,), True), Labelled((Q,), (B,), False)
LABELLED = {
    "completion": ({"prompt": "Q", "completion": "A", "label": True}, "unpaired", [GOOD_ONE]),
    "messages on both sides": (
        {"prompt": openai("Q"), "completion": openai("", "B")[1:], "label": False},
        "unpaired",
        [BAD_ONE],
    ),
    "1": ({"question": "Q", "response": "A", "label": 1}, "unpaired", [GOOD_ONE]),
    "0.0": ({"question": "Q", "response": "B", "label": 0.0}, "unpaired", [BAD_ONE]),
    "text of a CSV file": ({"prompt": "Q", "answer": "B", "label": "False"}, "unpaired", [BAD_ONE]),
    "messages": (
        {"messages": openai("Q", "x", "R", "A"), "label": True},
        "unpaired",
        [Labelled(turns("Q", "x", "R"), (A,), True)],
    ),
    "ShareGPT": ({"conversations": sharegpt("Q", "A"), "label": True}, "unpaired", [GOOD_ONE]),
    "a pair": (GOOD, "preference", [GOOD_ONE, BAD_ONE]),
    "a pair of conversations": (
        {"chosen": openai("Q", "A"), "rejected": openai("Q", "B")},
        "preference",
        [GOOD_ONE, BAD_ONE],
    ),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_responses_are_told_by_their_columns(name, tmp_path):
    row, data_format, expected = LABELLED[name]
    form, found = read_labelled(tmp_path, row)
    assert (form.name, found) == (data_format, expected)
    assert read_labelled(tmp_path, row, data_format=data_format)[1] == expected


def test_columns_of_labelled_responses_can_be_named(tmp_path):
    row = {"q": "Q", "a": "A", "good": True, "prompt": "x", "response": "y", "label": False}
    form, found = read_labelled(tmp_path, row, input_key="q", output_key="a", label_key="good")
    assert found == [GOOD_ONE]
    assert form.columns == "q -> a, label good"


def test_rows_that_hold_both_are_read_as_the_settings_say(tmp_path):
    row = GOOD | {"response": "C", "label": True}
    assert read_labelled(tmp_path, row)[0].name == "preference"
    assert read_labelled(tmp_path, row, data_format="unpaired")[0].name == "unpaired"
    assert read_labelled(tmp_path, row, label_key="label")[0].name == "unpaired"


ROW = {"prompt": "Q", "completion": "A", "label": True}
BAD_LABELLED = {
    "missing label": ({"prompt": "Q", "completion": "A"}, "column 'label' is neither true nor false .* but missing"),
    "null label": (ROW | {"label": None}, r"column 'label' is neither true nor false \(1 nor 0\) but null"),
    "score as label": (ROW | {"label": 0.7}, "column 'label' is neither true nor false .* but a float: 0.7"),
    "word as label": (ROW | {"label": "good"}, "column 'label' is neither true nor false .* but a str: 'good'"),
    "list as label": (ROW | {"label": [True]}, "column 'label' is neither true nor false .* but a list"),
    "empty response": (ROW | {"completion": ""}, "the response is empty"),
    "weight 0": (
        ROW | {"completion": UNWEIGHED[1:]},
        "an assistant turn is marked: this marker excludes text",
    ),
}


@pytest.mark.parametrize("name", BAD_LABELLED)
def test_bad_labelled_row_is_named_by_file_and_line(name, tmp_path):
    row, reason = BAD_LABELLED[name]
    with pytest.raises(UsageError, match=reason) as caught:
        read_labelled(tmp_path, ROW, row)
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl line 2: ")


def test_labelled_conversation_ends_with_the_assistant(tmp_path):
    with pytest.raises(UsageError, match="line 1: the conversation ends with user, expected an assistant turn"):
        read_labelled(tmp_path, {"messages": openai("Q", "A", "R"), "label": True})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Q", "response": "A"}, "no column of labels, desirable or not .*--label_key"),
        ({"prompt": "Q", "label": True}, "no column for the response .*--output_key"),
        ({"prompt": "Q", "answer": "A", "output": "A", "label": True}, "answer and output could all be the response"),
    ],
)
def test_columns_that_hold_no_labelled_responses_are_named(row, reason, tmp_path):
    with pytest.raises(UsageError, match=f"{reason}.*columns present|{reason}.*--output_key"):
        read_labelled(tmp_path, row)
