"""Rows with various tools and calls are equal after storage as Parquet, Arrow, CSV or a `datasets` folder."""

import csv
import datetime
import json
from decimal import Decimal
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from rlhf_cli.data.formats.conversations import Conversation, Labelled, Message
from rlhf_cli.data.formats.preference import PairColumns, choose_labelled_format, choose_pair_format
from rlhf_cli.data.formats.steps import StepColumns, choose_step_format
from rlhf_cli.data.formats.table import choose_format, choose_prompt_format
from rlhf_cli.data.reading.columns import Columns
from rlhf_cli.data.reading.json_cells import parsed, records, row_reader
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.errors import UsageError


def calling(name: str, arguments: dict[str, Any], properties: dict[str, Any], **message: Any) -> dict[str, Any]:
    function = {"name": name, "description": name, "parameters": {"type": "object", "properties": properties}}
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]} | message,
        {"role": "tool", "content": "R", "tool_call_id": "c1"},
        {"role": "assistant", "content": "A"},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


ROWS = [
    calling("town", {"town": "Ulm"}, {"town": {"type": "string"}}),
    calling("add", {"a": 1, "b": [2, 3]}, {"a": {"type": "integer", "enum": [1, 2]}, "b": {"type": "array"}}),
    calling("none", {}, {}, reasoning_content="think"),
    {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], "tools": []},
]


def read(path) -> list[Any]:
    rows = load_rows(str(path), split="train", seed=0)
    form = choose_format(rows.sources[0], Columns(None), data_format="auto")
    return [form.read(row) for row in rows]


@pytest.fixture
def as_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return read(path)


def parquet(path, rows):
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def texts(row):
    return {name: json.dumps(value) for name, value in row.items()}


def texts_inside(row):
    """Return the row with arguments and parameters as JSON strings, as in OpenAI's API."""
    row = json.loads(json.dumps(row))
    for message in row["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    for tool in row["tools"]:
        tool["function"]["parameters"] = json.dumps(tool["function"]["parameters"])
    return row


def entries_as_text(row):
    return {name: [json.dumps(entry) for entry in value] for name, value in row.items()}


def as_lists(row):
    """Return the row with lists of objects as one object of lists, as in older versions of datasets."""
    names: dict[str, None] = {}
    for message in row["messages"]:
        names.update(dict.fromkeys(message))
    messages = {name: [message.get(name) for message in row["messages"]] for name in names}
    return row | {"messages": messages}


STORED = {
    "structs": ROWS,
    "text": [texts(row) for row in ROWS],
    "text within": [texts_inside(row) for row in ROWS],
    "lists of text": [entries_as_text(row) for row in ROWS],
    "an object of lists": [as_lists(row) for row in ROWS],
}


@pytest.mark.parametrize("form", STORED)
def test_parquet_files_give_the_conversations_of_json_lines(form, as_lines, tmp_path) -> None:
    parquet(tmp_path / "rows.parquet", STORED[form])
    assert read(tmp_path / "rows.parquet") == as_lines


@pytest.mark.parametrize("form", STORED)
def test_saved_data_sets_give_the_conversations_of_json_lines(form, as_lines, tmp_path) -> None:
    datasets.Dataset.from_list(STORED[form]).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == as_lines


@pytest.mark.parametrize("features", ["Json", "lists of Json"])
def test_json_features_keep_the_nulls_that_rows_have(features, tmp_path) -> None:
    rows = [calling("town", {"town": None, "n": [None]}, {}), *ROWS]
    lists = {name: datasets.List(datasets.Json()) for name in ("messages", "tools")}
    kinds = lists if features != "Json" else {name: datasets.Json() for name in ("messages", "tools")}
    data = datasets.Dataset.from_list(rows, features=datasets.Features(kinds))
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = read(tmp_path / "rows.jsonl")
    assert expected[0].messages[1].tool_calls[0].arguments == {"town": None, "n": [None]}
    assert read(tmp_path / "saved") == read(tmp_path / "rows.parquet") == expected


def test_only_the_nulls_of_structs_are_arrows_own() -> None:
    kind = pa.struct({"a": pa.int64(), "b": pa.struct({"c": pa.string()}), "d": pa.list_(pa.bool_())})
    mapped = pa.map_(pa.string(), pa.struct({"x": pa.int64(), "y": pa.int64()}))
    schema = pa.schema({"s": kind, "m": mapped, "list": pa.large_list(kind), "empty": pa.string()})
    value = {"a": 1, "b": {"c": None}, "d": [True, None]}
    row = {"s": value, "m": {"p": {"x": 1}, "q": None}, "list": [None, {"a": None}], "empty": None}
    (stored,) = pa.Table.from_pylist([row], schema=schema).to_pylist()
    kept = {"a": 1, "b": {}, "d": [True, None]}
    assert row_reader(schema)(stored) == row | {"s": kept, "list": [None, {}]}


def test_csv_files_may_hold_messages_and_tools_as_json(as_lines, tmp_path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "tools"])
        writer.writeheader()
        writer.writerows(texts(row) for row in ROWS)
    assert read(tmp_path / "rows.csv") == as_lines


def test_text_of_python_is_refused_with_the_way_out(tmp_path) -> None:
    parquet(tmp_path / "rows.parquet", [{"messages": str(ROWS[3]["messages"])}])
    with pytest.raises(UsageError, match=r"row 0: column 'messages' .* not valid JSON .*: write the column with js"):
        read(tmp_path / "rows.parquet")


ASKED = (Message("user", "Q"),)
SIDES = {side: [{"role": "user", "content": "Q"}, {"role": "assistant", "content": side}] for side in "AB"}


def rows_of(tmp_path, row):
    parquet(tmp_path / "rows.parquet", [{name: json.dumps(value) for name, value in row.items()}])
    return load_rows(str(tmp_path / "rows.parquet"), split="train", seed=0)


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": SIDES["A"], "rejected": SIDES["B"]},
        {"prompt": SIDES["A"][:1], "chosen": SIDES["A"][1:], "rejected": SIDES["B"][1:]},
        {"prompt": SIDES["A"][:1], "chosen": SIDES["A"][1], "rejected": SIDES["B"][1]},
    ],
)
def test_sides_of_pairs_may_be_json_text(row, tmp_path) -> None:
    rows = rows_of(tmp_path, row)
    pair = choose_pair_format(rows.sources[0], PairColumns(None), data_format="auto").read(rows[0])
    assert (pair.prompt, pair.chosen, pair.rejected) == (
        ASKED,
        (Message("assistant", "A"),),
        (Message("assistant", "B"),),
    )


def test_labelled_conversations_prompts_and_steps_may_be_json_text(tmp_path) -> None:
    rows = rows_of(tmp_path, {"messages": SIDES["A"], "label": True})
    form = choose_labelled_format(rows.sources[0], PairColumns(None), data_format="auto")
    assert form.read(rows[0]) == [Labelled(ASKED, (Message("assistant", "A"),), desirable=True)]
    rows = rows_of(tmp_path, {"prompt": SIDES["A"][:1], "answer": "3"})
    prompts = choose_prompt_format(rows.sources[0], Columns(None), data_format="auto")
    assert prompts.read_prompt(rows[0]) == Conversation(ASKED)
    rows = rows_of(tmp_path, {"prompt": "Q", "completions": ["a", "b"], "labels": [True, None]})
    wanted = StepColumns(None, None, None, "ки", ("+", "-"))
    (solution,) = choose_step_format(rows.sources[0], wanted, data_format="auto").read(rows[0])
    assert (solution.steps, solution.labels) == (("a", "b"), (1.0, None))


@pytest.mark.parametrize("text", ['[{"role": "admin", "content": "x"}]', '{"role": "user"}', "[1, 2]", '["a"]', "{}"])
def test_json_that_is_no_message_is_text_to_be_learned(text, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Q", "response": text}) + "\n")
    assert read(tmp_path / "rows.jsonl") == [Conversation((*ASKED, Message("assistant", text)))]


def test_what_is_no_list_of_objects_stays_as_it_is() -> None:
    for value in ("text", 3, None, [1], {"a": [1], "b": [1, 2]}, {"a": 1}, "[1]", "1" * 5000, "[" * 100_000):
        assert records(value) == value
    assert parsed("[" * 100_000) == "[" * 100_000


def test_dates_and_decimals_of_a_call_are_as_json_has_them(tmp_path) -> None:
    when = datetime.datetime(2024, 1, 2, 3, 4, 5)
    given = {"when": when, "day": when.date(), "price": Decimal("1.50"), "took": datetime.timedelta(minutes=1)}
    parquet(tmp_path / "rows.parquet", [calling("f", given, {"day": {"type": "string"}})])
    (found,) = read(tmp_path / "rows.parquet")
    arguments = {"when": "2024-01-02T03:04:05", "day": "2024-01-02", "price": 1.5, "took": "0:01:00"}
    assert found.messages[1].tool_calls[0].arguments == arguments


def test_bytes_in_a_call_are_refused_by_name(tmp_path) -> None:
    parquet(tmp_path / "rows.parquet", [calling("f", {"data": b"x"}, {"data": {"type": "string"}})])
    with pytest.raises(UsageError, match=r"row 0: message 2 calls f with arguments that are not valid JSON: .* bytes"):
        read(tmp_path / "rows.parquet")


def test_objects_in_a_dictionary_of_arrow_lose_its_nulls() -> None:
    objects = pa.array([{"a": 1, "b": None}])
    table = pa.table({"cell": pa.DictionaryArray.from_arrays(pa.array([0, 0]), objects)})
    reader = row_reader(table.schema)
    assert [reader(row) for row in table.to_pylist()] == [{"cell": {"a": 1}}] * 2
