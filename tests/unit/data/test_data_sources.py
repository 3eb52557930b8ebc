"""Reading files, folders and Hub names, and mixing data sets."""

import csv
import gzip
import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_cli.data.reading.files import Table, read_file
from rlhf_cli.data.reading.sources import exact_shares, load_rows
from rlhf_cli.errors import UsageError

ROWS = [{"prompt": f"question {i} é 漢", "response": "a\nb" if i % 2 else f'"{i}", x'} for i in range(700)]


def damaged_parquet() -> bytes:
    """Return a file with valid metadata whose pages cannot be decompressed."""
    whole = io.BytesIO()
    pq.write_table(pa.table({"a": [f"text {number}" * 9 for number in range(99)]}), whole)
    content = bytearray(whole.getvalue())
    content[60:200] = bytes(140)
    return bytes(content)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


WRITERS = {
    ".jsonl": write_jsonl,
    ".json": lambda path, rows: path.write_text(json.dumps(rows, indent=2), encoding="utf-8"),
    ".csv": write_csv,
    ".parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300),
}


def rows_of(spec, **settings):
    return load_rows(str(spec), **{"split": "train", "seed": 0, **settings})


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_no_value_of_a_json_file_changes_its_type(suffix, tmp_path):
    """Libraries with typed columns would convert the first label to a datetime and the second to 1.0."""
    labels = ["2024-01-01", 1, 2.5, "two", 2**70, None, {}, {"x": 1}, {"y": [1, "a"]}]
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, [{"label": label} for label in labels] + [{"other": True}])
    found = [dict(row) for row in rows_of(path)]
    assert found == [{"label": label} for label in labels] + [{"other": True}]
    assert [type(row.get("label")) for row in found[:-1]] == [type(label) for label in labels]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_kind_of_file_gives_its_rows_in_order(suffix, packed, tmp_path):
    path = tmp_path / f"rows{suffix}"
    WRITERS[suffix](path, ROWS)
    if packed:
        path = tmp_path / f"packed{suffix}.gz"
        path.write_bytes(gzip.compress((tmp_path / f"rows{suffix}").read_bytes()))
    rows = rows_of(path)
    assert [dict(row) for row in rows] == ROWS
    assert dict(rows[-1]) == ROWS[-1]
    assert rows.sources[0].columns() == ["prompt", "response"]


def test_json_file_may_hold_one_object_per_line(tmp_path):
    write_jsonl(tmp_path / "rows.json", ROWS[:3])
    assert [dict(row) for row in rows_of(tmp_path / "rows.json")] == ROWS[:3]


def test_lines_may_be_blank_end_in_crlf_or_lack_the_last_break(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n\n {"a": 2}\n \n{"a": 3}')
    rows = rows_of(tmp_path / "rows.jsonl")
    assert [row["a"] for row in rows] == [1, 2, 3]
    assert str(rows[2].error("bad")) == f"{tmp_path}/rows.jsonl line 6: bad"


def test_columns_may_differ_in_type_between_rows(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"a": 1}, {"a": "x"}, {"a": [1], "b": None}])
    assert [dict(row) for row in rows_of(tmp_path / "rows.jsonl")] == [{"a": 1}, {"a": "x"}, {"a": [1], "b": None}]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_nan_in_json_is_an_empty_cell(suffix, tmp_path):
    WRITERS[suffix](tmp_path / f"rows{suffix}", [{"a": float("nan"), "b": float("-inf")}])
    assert [dict(row) for row in rows_of(tmp_path / f"rows{suffix}")] == [{"a": None, "b": float("-inf")}]


def test_csv_values_stay_text(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n007,\n1e3,NA\n")
    assert [dict(row) for row in rows_of(tmp_path / "rows.csv")] == [{"a": "007", "b": ""}, {"a": "1e3", "b": "NA"}]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_csv_lines_end_in_any_way(end, tmp_path):
    (tmp_path / "rows.csv").write_bytes(end.join(["a,b", "1,2", "3,4", ""]).encode())
    assert [dict(row) for row in rows_of(tmp_path / "rows.csv")] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


MALFORMED = {
    "cut.jsonl": (b'{"a": 1}\n{"a": 2\n', "line 2 is not valid JSON: Expecting ',' delimiter at column 8"),
    "number.jsonl": (b'{"a": 1}\n\n7\n', "line 3 is 7, expected an object"),
    "latin.jsonl": (b'{"a": "\xe9"}\n', "line 1 is not UTF-8 text"),
    "digits.jsonl": (b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}", "line 2 has a whole number of too many digits"),
    "deep.jsonl": (b'{"a": 1}\n{"a": ' + b"[" * 100_000, "line 2 is nested too deeply"),
    "digits.json": (b'[{"a": ' + b"1" * 5000 + b"}]", "row 0 has a whole number of too many digits"),
    "deep.json": (b'[{"a": 1}, {"a": ' + b"[" * 100_000, "row 1 is nested too deeply"),
    "pretty.json": (b'{\n "a": 1\n}\n', "line 1 is not valid JSON.* one object per line, or a list"),
    "cut.json": (b'[\n {"a": 1},\n {"a": 2\n', "line 4 is not valid JSON"),
    "comma.json": (b'[{"a": 1}\n {"a": 2}]', "line 2 is not valid JSON: Expecting ',' or ']'"),
    "trailing.json": (b'[{"a": 1},]', "line 1 is not valid JSON: Expecting value"),
    "extra.json": (b'[{"a": 1}]\n[]', "line 2 is not valid JSON: Extra data"),
    "open.json": (b"[", "line 1 is not valid JSON: Expecting value"),
    "numbers.json": (b"[1, 2]", "row 0 is 1, expected an object"),
    "latin.json": (b'[{"a": "\xe9"}]', "is not UTF-8 text"),
    "short.csv": (b"a,b\n1,2\n3\n", "not a valid CSV file: .*Row #3: Expected 2 columns, got 1"),
    "latin.csv": (b"a,b\n1,\xe9\n", "not a valid CSV file: .*UTF8"),
    "twice.csv": (b"a,a\n1,2\n", "names a column twice"),
    "blank_first.csv": (b"\na,b\n1,2\n", "line 1 is blank: the first line of a CSV file names its columns"),
    "long_name.csv": (b"a" * 200_000 + b",b\n1,2\n", "line 1 names no columns: field larger than"),
    "text.parquet": (b"a,b\n1,2\n", "cannot be read as Parquet"),
    "damaged.parquet": (damaged_parquet(), "cannot be read: .*[Cc]orrupt|cannot be read: .*end of stream"),
    "plain.jsonl.gz": (b'{"a": 1}\n', "is damaged"),
    "cut.jsonl.gz": (gzip.compress(b'{"a": 1}\n' * 99)[:-12], "is damaged"),
    "empty.jsonl": (b"", "is empty: it has no rows"),
    "blank.jsonl": (b"\n \n\n", "is empty: it has no rows"),
    "empty.json": (b"[ ]", "is empty: it has no rows"),
    "empty.csv": (b"", "is empty: it has no rows"),
    "header.csv": (b"a,b\n", "is empty: it has no rows"),
    "data.txt": (b"hello", r"is no data file: its name ends in none of \.jsonl, \.json, \.csv, \.parquet"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_file_is_named_with_the_line(name, tmp_path):
    content, reason = MALFORMED[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=reason) as caught:
        list(rows_of(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.jsonl", "no file '.*missing.jsonl'"),
        ("missing", "no file or folder '.*missing' .*owner/name"),
        ("missing.jsonl@test", "no file|one file and has no split"),
        ("rows.jsonl@test", "one file and has no split 'test'"),
        ("rows.jsonl,", "empty name"),
        ("n" * 300, "no file or folder '.*n{300}'"),
        ("n" * 300 + "@test", "no file or folder '.*n{300}'"),
        ("nothing", "no data file"),
        ("splits@validation", r"no file of the split 'validation'; its files: data.jsonl, test.jsonl, train/0.csv"),
    ],
)
def test_what_is_not_there_is_named(name, reason, tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "README.md").write_text("no data")
    make_split_folder(tmp_path / "splits")
    with pytest.raises(UsageError, match=reason):
        rows_of(tmp_path / name)


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"rows\.jsonl cannot be read: Is a directory"):
        read_file(tmp_path / "rows.jsonl")


def make_split_folder(folder):
    (folder / "train").mkdir(parents=True)
    write_csv(folder / "train" / "0.csv", ROWS[:2])
    write_jsonl(folder / "test.jsonl", ROWS[2:5])
    write_jsonl(folder / "data.jsonl", ROWS[5:6])
    (folder / ".hidden.jsonl").write_text("not JSON")
    (folder / "README.md").write_text("about")


def test_folder_gives_the_files_of_the_split(tmp_path):
    make_split_folder(tmp_path)
    assert [dict(row) for row in rows_of(tmp_path)] == ROWS[:2]
    assert [dict(row) for row in rows_of(f"{tmp_path}@test")] == ROWS[2:5]
    assert [dict(row) for row in rows_of(tmp_path, split="test")] == ROWS[2:5]


def test_folder_without_split_names_is_read_in_the_order_of_names(tmp_path):
    for name, part in {"b.jsonl": ROWS[2:4], "a.jsonl": ROWS[:2], "test.jsonl": ROWS[4:6]}.items():
        write_jsonl(tmp_path / name, part)
    rows = rows_of(tmp_path)
    assert [dict(row) for row in rows] == ROWS[:4]
    assert str(rows[3].error("bad")).endswith("b.jsonl line 2: bad")


def test_saved_dataset_folder_is_read(tmp_path):
    import datasets

    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:3])})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert [dict(row) for row in rows_of(tmp_path / "saved")] == ROWS[:3]
    with pytest.raises(UsageError, match="no split 'test'; its splits: train"):
        rows_of(f"{tmp_path / 'saved'}@test")


def test_hub_names_are_read_by_split_and_configuration():
    asked = []

    def hub(name, split):
        asked.append((name, split))
        return Table(name, 2, lambda i: {"a": i}, lambda i: f"row {i}")

    rows = rows_of("owner/name:main@test,owner/other", hub=hub)
    assert asked == [("owner/name:main", "test"), ("owner/other", "train")]
    assert [row["a"] for row in rows] == [0, 1, 0, 1]
    assert str(rows[1].error("bad")) == "owner/name:main row 1: bad"


def test_hub_that_cannot_be_reached_is_one_sentence():
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    script = "from rlhf_cli.data.reading.sources import load_rows; load_rows('nobody/nothing', split='train', seed=0)"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert "UsageError: 'nobody/nothing' is no local file or folder" in last


def test_sources_follow_one_another_without_probabilities(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    write_csv(tmp_path / "b.csv", ROWS[3:5])
    rows = rows_of(f"{tmp_path}/a.jsonl, {tmp_path}/b.csv")
    assert [dict(row) for row in rows] == ROWS[:5]
    assert rows.used() == [3, 2]
    assert rows_of(f"{tmp_path}/a.jsonl,{tmp_path}/b.csv", max_samples=4).used() == [3, 1]


def test_list_of_files_may_be_longer_than_a_name_can_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{number:02}{'n' * 30}.jsonl" for number in range(11)]
    for name in names:
        write_jsonl(tmp_path / name, ROWS[:1])
    assert rows_of(",".join(names)).used() == [1] * 11


def mixture(tmp_path, probs, **settings):
    write_jsonl(tmp_path / "a.jsonl", [{"a": i} for i in range(100)])
    write_jsonl(tmp_path / "b.jsonl", [{"b": i} for i in range(60)])
    return rows_of(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", probs=probs, **settings)


def test_mixture_has_exact_shares_and_repeats_nothing(tmp_path):
    rows = mixture(tmp_path, "0.25,0.75")
    assert rows.used() == [20, 60]  # 60 / 0.75 = 80 rows in total
    assert len({(row.source.name, row.index) for row in rows}) == 80
    assert mixture(tmp_path, "0.25,0.75", max_samples=8).used() == [2, 6]
    first_half = [row.source.name for row in rows[:40]]
    assert 0 < first_half.count(f"{tmp_path}/a.jsonl") < 20


def test_mixture_depends_on_the_seed_alone(tmp_path):
    orders = [[dict(row) for row in mixture(tmp_path, "0.5,0.5", seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (10, [0.3, 0.7], [3, 7]),
        (10, [1 / 3, 1 / 3, 1 / 3], [4, 3, 3]),
        (7, [0.5, 0.25, 0.25], [3, 2, 2]),
        (0, [1], [0]),
    ],
)
def test_exact_shares_by_hand(total, shares, expected):
    assert exact_shares(total, shares) == expected


@pytest.mark.parametrize(
    ("probs", "reason"),
    [
        ("0.5", "are 1 for 2 data sets"),
        ("0.5,x", "not numbers"),
        ("0.5,0.6", "add up to 1, not 1.1"),
        ("1,0", "positive"),
        ("0.5,nan", "add up to 1, not nan"),
    ],
)
def test_bad_probabilities_are_named(probs, reason, tmp_path):
    with pytest.raises(UsageError, match=reason):
        mixture(tmp_path, probs)


def test_local_files_touch_no_cache_and_leave_nothing_behind(tmp_path):
    for suffix in WRITERS:
        WRITERS[suffix](tmp_path / f"rows{suffix}", ROWS)
    places = {name: tmp_path / name for name in ("home", "tmp")}
    for place in places.values():
        place.mkdir()
    environment = {**os.environ, "HF_HOME": str(places["home"]), "TMPDIR": str(places["tmp"])}
    script = (
        "import sys, os; from rlhf_cli.data.reading.sources import load_rows\n"
        f"files = ['{tmp_path}/rows' + s for s in {list(WRITERS)}]\n"
        "rows = load_rows(','.join(files), split='train', seed=0)\n"
        "assert len(list(rows)) == 2800 and 'datasets' not in sys.modules\n"
        "os._exit(0)"  # exit without cleanup, like a killed process
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert not list(places["home"].iterdir())
    assert not list(places["tmp"].iterdir())
