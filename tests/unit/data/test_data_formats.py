"""Conversion of rows in each format to conversations, and detection of formats."""

import json
import math
from typing import Any

import pytest

from rlhf_cli.data.formats.conversations import Conversation, Document, Message, ToolCall
from rlhf_cli.data.formats.table import choose_format, choose_prompt_format
from rlhf_cli.data.reading.columns import Columns
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.errors import UsageError


def rows_of(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(str(path), split="train", seed=0)


def read(tmp_path, *rows, data_format="auto", input_key=None, output_key=None):
    loaded = rows_of(tmp_path, *rows)
    form = choose_format(loaded.sources[0], Columns(input_key, output_key), data_format=data_format)
    return form, [form.read(row) for row in loaded]


def conversation(*turns):
    return Conversation(tuple(Message(role, content) for role, content in turns))


ASKED = conversation(("user", "Q"), ("assistant", "A"))
INSTRUCTED = conversation(("system", "S"), ("user", "Q"), ("assistant", "A"))
OPENAI = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
SHAREGPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]

DETECTED = {
    "prompt, response": ({"prompt": "Q", "response": "A"}, "prompt_response", ASKED),
    "question, answer": ({"id": 3, "question": "Q", "answer": "A"}, "prompt_response", ASKED),
    "instruction, output": ({"instruction": "Q", "output": "A"}, "prompt_response", ASKED),
    "input, output": ({"input": "Q", "output": "A"}, "prompt_response", ASKED),
    "query, completion": ({"query": "Q", "completion": "A"}, "prompt_response", ASKED),
    "a number as answer": (
        {"question": "Q", "answer": 42},
        "prompt_response",
        conversation(("user", "Q"), ("assistant", "42")),
    ),
    "Alpaca with input": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "text": "Add. 1 2 3"},
        "prompt_response",
        conversation(("user", "Add.\n\n1 2"), ("assistant", "3")),
    ),
    "Alpaca without input": ({"instruction": "Q", "input": "", "output": "A"}, "prompt_response", ASKED),
    "Alpaca with NaN as input": ({"instruction": "Q", "input": math.nan, "output": "A"}, "prompt_response", ASKED),
    "empty context and history": (
        {"question": "Q", "context": "", "history": [], "answer": "A"},
        "prompt_response",
        ASKED,
    ),
    "weights that change nothing": (
        {"messages": [OPENAI[0] | {"weight": 0}, OPENAI[1] | {"weight": 1}]},
        "messages",
        ASKED,
    ),
    "Dolly": (
        {"instruction": "Q", "context": "C", "response": "A"},
        "prompt_response",
        conversation(("user", "Q\n\nC"), ("assistant", "A")),
    ),
    "Orca": ({"system_prompt": "S", "question": "Q", "response": "A"}, "prompt_response", INSTRUCTED),
    "lists of messages": ({"prompt": OPENAI[:1], "completion": OPENAI[1:]}, "prompt_response", ASKED),
    "messages": ({"messages": OPENAI, "prompt": "Q"}, "messages", ASKED),
    "messages with parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, OPENAI[1]]},
        "messages",
        ASKED,
    ),
    "developer role": ({"messages": [{"role": "developer", "content": "S"}, *OPENAI]}, "messages", INSTRUCTED),
    "ShareGPT": ({"conversations": SHAREGPT}, "sharegpt", ASKED),
    "ShareGPT with system column": ({"conversations": SHAREGPT, "system": "S"}, "sharegpt", INSTRUCTED),
    "ShareGPT with tool": (
        {"conversations": [*SHAREGPT, {"from": "observation", "value": "T"}, {"from": "gpt", "value": "B"}]},
        "sharegpt",
        conversation(("user", "Q"), ("assistant", "A"), ("tool", "T"), ("assistant", "B")),
    ),
    "ShareGPT with function_call": (
        {
            "conversations": [
                SHAREGPT[0],
                {"from": "function_call", "value": '{"name": "f"}'},
                {"from": "observation", "value": "T"},
                SHAREGPT[1],
            ],
            "tools": '[{"name": "f"}]',
        },
        "sharegpt",
        Conversation(
            conversation(("user", "Q"), ("assistant", '{"name": "f"}'), ("tool", "T"), ("assistant", "A")).messages,
            ({"type": "function", "function": {"name": "f"}},),
        ),
    ),
    "OpenAI's keys in conversations": ({"conversations": OPENAI}, "messages", ASKED),
    "text": ({"text": "Once.", "meta": 1}, "text", Document("Once.")),
}


@pytest.mark.parametrize("name", DETECTED)
def test_format_is_detected_by_the_columns(name, tmp_path):
    row, data_format, expected = DETECTED[name]
    form, examples = read(tmp_path, row)
    assert form.name == data_format
    assert examples == [expected]
    assert read(tmp_path, row, data_format=data_format)[1] == [expected]


def test_columns_can_be_named(tmp_path):
    row = {"q": "Q", "a": "A", "prompt": "x", "answer": "y", "turns": OPENAI, "body": "Once."}
    assert read(tmp_path, row, input_key="q", output_key="a")[1] == [ASKED]
    assert read(tmp_path, row, input_key="q")[1] == [conversation(("user", "Q"), ("assistant", "y"))]
    assert read(tmp_path, row, input_key="turns")[1] == [ASKED]
    assert read(tmp_path, row, input_key="body", data_format="text")[1] == [Document("Once.")]
    assert read(tmp_path, row, input_key="q", output_key="a")[0].columns == "q -> a"


def test_named_prompt_column_takes_nothing_from_beside_it(tmp_path):
    row = {"instruction": "Q", "input": "I", "context": "C", "history": [["x", "y"]], "output": "A"}
    assert read(tmp_path, row, input_key="instruction")[1] == [ASKED]


LATE: dict[str, tuple[dict[str, Any], Any]] = {
    "context": ({"input": "hallo welt"}, (("user", "Q\n\nhallo welt"), ("assistant", "A"))),
    "a number as context": ({"input": 0}, (("user", "Q\n\n0"), ("assistant", "A"))),
    "system message": ({"system": "S"}, (("system", "S"), ("user", "Q"), ("assistant", "A"))),
    "second name of it": ({"system": "", "system_prompt": "S"}, (("system", "S"), ("user", "Q"), ("assistant", "A"))),
}


@pytest.mark.parametrize("name", LATE)
def test_columns_that_appear_late_are_read(name, tmp_path):
    added, expected = LATE[name]
    row = {"instruction": "Q", "output": "A"}
    assert read(tmp_path, *[row] * 100, row | added)[1] == [ASKED] * 100 + [conversation(*expected)]


def test_late_input_beside_what_is_no_instruction_is_refused(tmp_path):
    row = {"prompt": "Q", "answer": "A"}
    with pytest.raises(
        UsageError, match=r"line 101: column 'input' is not empty, .* leave it out with --input_key prompt"
    ):
        read(tmp_path, *[row] * 100, row | {"input": "I"})


def test_system_message_beside_messages_may_appear_late(tmp_path):
    row = {"messages": OPENAI}
    assert read(tmp_path, *[row] * 100, row | {"system": "S"})[1][-1] == INSTRUCTED


def test_missing_column_of_a_longer_source_is_said_to_be_missing_in_its_first_rows(tmp_path):
    with pytest.raises(
        UsageError, match=r"no column 'q' \(--input_key\); columns present in the first 100 rows: prompt"
    ):
        read(tmp_path, *[{"prompt": "Q", "answer": "A"}] * 100, {"q": "Q"}, input_key="q")


UNFIT = {
    "no known column": ({"a": "Q", "b": "A"}, {}, r"rows.jsonl: no format fits.*columns present: a, b"),
    "no response": (
        {"prompt": "Q", "x": "A"},
        {"data_format": "prompt_response"},
        "no column for the response.*prompt, x",
    ),
    "no prompt": ({"answer": "A"}, {"data_format": "prompt_response"}, "no column for the prompt.*present: answer"),
    "input_key missing": (
        {"prompt": "Q", "answer": "A"},
        {"input_key": "q"},
        r"no column 'q' \(--input_key\); .*prompt, answer",
    ),
    "output_key missing": ({"prompt": "Q"}, {"output_key": "a"}, r"no column 'a' \(--output_key\)"),
    "no messages": ({"prompt": "Q"}, {"data_format": "messages"}, "no column with messages.*present: prompt"),
    "no text": ({"prompt": "Q"}, {"data_format": "text"}, "no column 'text'|'text'"),
    "two responses": (
        {"problem": "Q", "solution": "S", "answer": "A"},
        {},
        "answer and solution could all be the response.*--output_key",
    ),
    "two prompts": (
        {"prompt": "Q", "question": "Q", "answer": "A"},
        {},
        "prompt and question could all be the prompt.*--input_key",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_columns_that_fit_no_format_are_named(name, tmp_path):
    row, settings, reason = UNFIT[name]
    with pytest.raises(UsageError, match=reason):
        read(tmp_path, row, **settings)


def said(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


CALLS: list[dict[str, Any]] = [
    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
]


def calling(calls):
    return {"messages": [OPENAI[0], {"role": "assistant", "content": None, "tool_calls": calls}]}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ANSWERED = [{"role": "tool", "content": "T", "tool_call_id": "c1", "name": "f"}, OPENAI[1]]
CALLED = Conversation(
    (
        Message("user", "Q"),
        Message("assistant", "", (ToolCall("f", {"a": [1, "é"]}, "c1"),)),
        Message("tool", "T", tool_call_id="c1", name="f"),
        Message("assistant", "A"),
    ),
    (TOOL,),
)
WITH_CALLS = {
    "objects": {"messages": calling(CALLS)["messages"] + ANSWERED, "tools": [TOOL]},
    "JSON text": {
        "messages": [
            OPENAI[0],
            {
                "role": "assistant",
                "tool_calls": [CALLS[0] | {"function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}],
            },
            *ANSWERED,
        ],
        "tools": json.dumps([TOOL]),
    },
    "bare functions": {
        "messages": [
            OPENAI[0],
            {"role": "assistant", "content": "", "tool_calls": [CALLS[0]["function"] | {"id": "c1"}]},
            *ANSWERED,
        ],
        "tools": [json.dumps(TOOL["function"])],
    },
}


@pytest.mark.parametrize("name", WITH_CALLS)
def test_tools_and_tool_calls_are_read_in_any_of_their_forms(name, tmp_path):
    assert read(tmp_path, WITH_CALLS[name])[1] == [CALLED]
    prompt = {**WITH_CALLS[name], "messages": WITH_CALLS[name]["messages"][:3]}
    assert prompts(tmp_path, prompt) == [(Conversation(CALLED.messages[:3], CALLED.tools), None)]


@pytest.mark.parametrize("empty", [None, "", [], "[]"])
def test_row_may_have_no_tools(empty, tmp_path):
    assert read(tmp_path, {"messages": OPENAI, "tools": empty})[1] == [ASKED]


BAD_ROWS = {
    "no assistant": (said(("user", "Q")), "no assistant turn"),
    "no messages": ({"messages": []}, "has no messages"),
    "no list": ({"messages": "Q"}, "not a list of messages but a str"),
    "null list": ({"messages": None}, "not a list of messages but null"),
    "column missing": ({"other": 1}, "not a list of messages but missing; columns present: other"),
    "empty response": (said(("user", "Q"), ("assistant", " \n")), "the response is empty"),
    "null content": (said(("user", None), ("assistant", "A")), "message 1 from user has null content"),
    "no call": (calling([1]), "message 2 has the tool call 1, expected"),
    "call without a name": (calling([{"function": {"arguments": {}}}]), "message 2 has the tool call .*expected"),
    "no list of calls": (calling({"name": "f"}), "message 2 has tool_calls that are not a list"),
    "arguments": (calling([{"function": {"name": "f", "arguments": "Paris"}}]), "calls f with arguments .*'Paris'"),
    "no calls": (calling([]), "message 2 from assistant has null content"),
    "user who calls": (
        {"messages": [{"role": "user", "content": "Q", "tool_calls": CALLS}, OPENAI[1]]},
        "message 1 from user has tool calls",
    ),
    "tools in words": ({"messages": OPENAI, "tools": "f, g"}, "column 'tools' is not a list of functions but 'f, g'"),
    "tools of digits": ({"messages": OPENAI, "tools": "1" * 5000}, "column 'tools' is not a list of functions but '11"),
    "tools too deep": ({"messages": OPENAI, "tools": "[" * 100_000}, "column 'tools' is not a list of functions but"),
    "tool without a name": ({"messages": OPENAI, "tools": [{"type": "x"}]}, "column 'tools' has .* as tool 1"),
    "user last": (
        said(("user", "Q"), ("assistant", "A"), ("user", "Q")),
        "the conversation ends with user, expected an assistant turn",
    ),
    "tool last": (
        said(("user", "Q"), ("assistant", "A"), ("tool", "T")),
        "the conversation ends with tool, expected an assistant turn",
    ),
    "sound": (
        {"messages": [{"role": "user", "content": [{"type": "audio", "url": "x"}]}, OPENAI[1]]},
        "message 1 has a part of type 'audio': parts are text or image",
    ),
    "part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, OPENAI[1]]},
        "message 1 has content that is not text",
    ),
    "two users": (
        said(("user", "Q"), ("user", "Q"), ("assistant", "A")),
        "message 2 is from user after user, expected assistant",
    ),
    "assistant first": (
        said(("assistant", "A"), ("user", "Q")),
        "message 1 is from assistant at the start, expected system or user",
    ),
    "weight -1": (
        {"messages": [OPENAI[0], OPENAI[1] | {"weight": -1}]},
        "message 2 has weight -1, expected a number from 0",
    ),
    "late system": (said(("user", "Q"), ("system", "S")), "message 2 is from system after user"),
    "unknown role": (said(("user", "Q"), ("narrator", "A")), "unknown role 'narrator'; known: system"),
    "no role": ({"messages": [{"content": "Q"}]}, "message 1 has content, expected 'role' and 'content'"),
    "other keys": ({"messages": SHAREGPT}, "message 1 has from, value, expected 'role' and 'content'"),
    "no message": ({"messages": ["Q"]}, "message 1 is 'Q', expected"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_named_by_file_and_line(name, tmp_path):
    row, reason = BAD_ROWS[name]
    with pytest.raises(UsageError, match=reason) as caught:
        read(tmp_path, said(("user", "Q"), ("assistant", "A")), row)
    assert f"{tmp_path}/rows.jsonl line 2: " in str(caught.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Q", "answer": ""}, "the response is empty"),
        (
            {"prompt": "Q", "answer": [OPENAI[1] | {"weight": -1}]},
            "message 1 has weight -1, expected a number from 0",
        ),
        ({"prompt": "Q", "answer": None}, "column 'answer' is not text but null"),
        ({"prompt": None, "answer": "A"}, "column 'prompt' is not text but null"),
        ({"prompt": "Q"}, "column 'answer' is not text but missing; columns present: prompt"),
        ({"prompt": "Q", "answer": ["A"]}, "column 'answer' is not text but a list"),
        ({"prompt": "Q", "answer": True}, "column 'answer' is not text but a bool"),
        ({"prompt": "Q", "answer": math.nan}, "column 'answer' is not text but null"),
        ({"prompt": "Q", "context": "C", "answer": "A"}, "column 'context' is not empty, but is not read beside 'prom"),
        ({"prompt": "Q", "history": [["x", "y"]], "answer": "A"}, "column 'history' is not empty, but is not read"),
    ],
)
def test_bad_prompt_or_response_is_named_by_file_and_line(row, reason, tmp_path):
    with pytest.raises(UsageError, match=f"rows.jsonl line 2: {reason}"):
        read(tmp_path, {"prompt": "Q", "answer": "A"}, row)


def prompts(tmp_path, *rows, data_format="auto", input_key=None, label_key=None):
    loaded = rows_of(tmp_path, *rows)
    columns = Columns(input_key, label_key=label_key)
    form = choose_prompt_format(loaded.sources[0], columns, data_format=data_format)
    return [(form.read_prompt(row), form.read_label(row)) for row in loaded]


Q = conversation(("user", "Q"))
PROMPTS = {
    "gsm8k": ({"question": "Q", "answer": "so\n#### 18"}, (Q, "so\n#### 18")),
    "list of from and value": ({"prompt": [{"from": "user", "value": "Q"}], "final_answer": "p - q"}, (Q, "p - q")),
    "messages": ({"messages": OPENAI[:1], "label": 3}, (Q, "3")),
    "list of role and content": ({"prompt": OPENAI[:1], "ground_truth": 0.5}, (Q, "0.5")),
    "list of one": ({"problem": "Q", "answer": ["7"]}, (Q, "7")),
    "list of two": ({"problem": "Q", "answer": ["7", "é"]}, (Q, '["7", "é"]')),
    "answer before solution": ({"problem": "Q", "solution": "S", "answer": "7"}, (Q, "7")),
    "system": ({"system": "S", "prompt": "Q"}, (conversation(("system", "S"), ("user", "Q")), None)),
    "multi-turn": (
        {"prompt": [*OPENAI, {"role": "user", "content": "Q2"}], "label": None},
        (conversation(("user", "Q"), ("assistant", "A"), ("user", "Q2")), None),
    ),
    "no label": ({"prompt": "Q"}, (Q, None)),
    "weight of a turn that is not trained": (
        {"messages": [OPENAI[0], OPENAI[1] | {"weight": 0}, OPENAI[0]]},
        (conversation(("user", "Q"), ("assistant", "A"), ("user", "Q")), None),
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_and_ground_truths_are_found(name, tmp_path):
    row, expected = PROMPTS[name]
    assert prompts(tmp_path, row) == [expected]


def format_of_prompt(row):
    first = row.get("prompt", row.get("messages"))
    return ("sharegpt" if "from" in first[0] else "messages") if isinstance(first, list) else "prompt"


@pytest.mark.parametrize("name", PROMPTS)
def test_format_of_prompts_can_be_forced_and_rows_of_others_are_refused(name, tmp_path):
    row, expected = PROMPTS[name]
    forced = format_of_prompt(row)
    assert prompts(tmp_path, row, data_format=forced) == [expected]
    for other in {"prompt", "messages", "sharegpt"} - {forced}:
        fault = (
            rf"line 1: column '\w+' is read as {other} \(--data_format\), but is a (str|list): |no column for the pro"
        )
        with pytest.raises(UsageError, match=fault):
            prompts(tmp_path, row, data_format=other)


def test_prompt_and_messages_side_by_side_are_read_as_the_settings_say(tmp_path):
    row = {"prompt": "P", "messages": OPENAI[:1], "question": "Q"}
    assert prompts(tmp_path, row, data_format="messages") == [(Q, None)]
    assert prompts(tmp_path, row, data_format="prompt", input_key="question") == [(Q, None)]
    with pytest.raises(UsageError, match=r"line 2: column 'messages' is read as messages .* but is null"):
        prompts(tmp_path, row, row | {"messages": None}, data_format="messages")


def test_ground_truths_that_appear_late_are_read(tmp_path):
    found = prompts(tmp_path, *[{"prompt": "Q"}] * 100, {"prompt": "Q", "solution": "S", "answer": "7"})
    assert [label for _, label in found] == [None] * 100 + ["7"]


def test_label_column_can_be_named(tmp_path):
    assert prompts(tmp_path, {"q": "Q", "gold": 7, "label": 8}, input_key="q", label_key="gold") == [(Q, "7")]
    with pytest.raises(UsageError, match=r"no column 'gold' \(--label_key\); columns present: prompt"):
        prompts(tmp_path, {"prompt": "Q"}, label_key="gold")
    with pytest.raises(UsageError, match=r"line 2: column 'gold' \(--label_key\) is null"):
        prompts(tmp_path, {"prompt": "Q", "gold": 1}, {"prompt": "Q", "gold": None}, label_key="gold")


def test_prompt_ends_with_the_users_turn(tmp_path):
    with pytest.raises(UsageError, match="line 1: a prompt ends with a user turn, this one with assistant"):
        prompts(tmp_path, {"messages": OPENAI})
    with pytest.raises(UsageError, match=r"no column for the prompt .*columns present: a"):
        prompts(tmp_path, {"a": "Q"})
