"""The index of a samples file: filters, order, pages, growth and replacement of the file."""

import json
import os
import sqlite3

import pytest
from viewed_runs import sample, write

from rlhf_cli.tracking.view import index as index_module
from rlhf_cli.tracking.view.index import Query, SampleIndex


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path, map(sample, range(12)))
    return path


@pytest.fixture
def index(path):
    found = SampleIndex(path)
    found.extend(10.0)
    yield found
    found.close()


def ids(index, query, **part):
    """Return the lengths of the selected samples: sample i has length i + 1."""
    return [row["length"] for row in index.page(query, **{"skip": 0, "limit": 50, "seconds": 10.0} | part).rows]


@pytest.mark.parametrize(
    ("query", "lengths"),
    [
        (Query(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (Query(descending=True, bounds={"step": (2, 2)}), [8, 7, 6, 5]),
        (Query({"step": (2, None), "reward": (1, None)}), [6, 8, 10, 12]),
        (Query({"length": (4, 6)}, order="length", descending=True), [6, 5, 4]),
        (Query({"group": (3, 3)}), [7, 8]),
        (Query({"advantage": (None, 0), "step": (1, 1)}), [1, 3]),
        (Query({"step": (1, 1)}, order="reward", descending=True), [4, 2, 3, 1]),
        (Query(text="ANSWER 1"), [2, 11, 12]),
        (Query({"reward": (1, 1)}, text="question 5"), [12]),
        (Query(text="no such text"), []),
    ],
)
def test_samples_are_filtered_and_sorted(index, query, lengths):
    assert ids(index, query) == lengths


def test_pages_follow_each_other_without_gap(index):
    query = Query({"reward": (1, 1)}, order="length", descending=True)
    pages = [index.page(query, skip=skip, limit=4, seconds=10.0) for skip in (0, 4)]
    assert [row["length"] for page in pages for row in page.rows] == [12, 10, 8, 6, 4, 2]
    assert [(page.next, page.total) for page in pages] == [(4, 6), (None, 6)]


def test_a_search_of_a_text_continues_where_its_time_ended(path, monkeypatch):
    monkeypatch.setattr(index_module, "_LINES_TOGETHER", 5)
    index = SampleIndex(path)
    while index.extend(0.001)[0] < path.stat().st_size:
        pass
    query = Query(text="answer 11")
    first = index.page(query, skip=0, limit=50, seconds=0.0)
    assert (first.rows, first.next) == ([], 5)
    last = index.page(query, skip=10, limit=50, seconds=0.0)
    assert ([row["length"] for row in last.rows], last.next) == ([12], None)
    index.close()


def test_samples_without_a_value_are_last_and_in_no_range(path):
    write(path, [sample(12, reward=None), sample(13, reward=0.5)])
    index = SampleIndex(path)
    index.extend(10.0)
    assert ids(index, Query({"step": (4, 4)}, order="reward")) == [14, 13]
    assert ids(index, Query({"step": (4, 4), "reward": (None, 9)})) == [14]
    index.close()


def test_samples_are_filtered_by_prompt(index):
    write(index._samples, [sample(12, prompt="question 1", group=77)])
    index.extend(10.0)
    prompt = index.row(13)["prompt_number"]
    assert ids(index, Query({"prompt": (prompt, prompt)})) == [3, 4, 13]


def test_lines_are_added_while_the_file_grows_and_a_torn_one_waits(path, index):
    line = json.dumps(sample(12)) + "\n"
    with path.open("a") as lines:
        lines.write(line[:30])
    done, size = index.extend(10.0)
    assert (len(ids(index, Query())), size - done) == (12, 30)
    with path.open("a") as lines:
        lines.write(line[30:])
    assert index.extend(10.0) == (path.stat().st_size, path.stat().st_size)
    assert ids(index, Query(descending=True))[0] == 13


def test_the_index_is_kept_and_is_built_again_for_a_replaced_file(path, index, monkeypatch):
    index.close()
    read = []
    monkeypatch.setattr(index_module, "_values", lambda line: read.append(line))
    SampleIndex(path).extend(10.0)
    assert read == []
    monkeypatch.undo()
    # As a resumed run does: fewer lines, in a new file, and then other samples.
    path.rename(path.with_name("before"))
    write(path, [*map(sample, range(3)), *(sample(number, length=100 + number) for number in range(3, 20))])
    again = SampleIndex(path)
    again.extend(10.0)
    assert ids(again, Query()) == [1, 2, 3, *range(103, 120)]
    again.close()


def test_broken_lines_and_broken_indexes_are_no_failure(path):
    with path.open("ab") as lines:
        lines.write(b"\xff\xfe\n[1]\n")
    write(path, [sample(12)])
    path.with_name("samples.jsonl.index").write_bytes(b"not a database" * 100)
    index = SampleIndex(path)
    index.extend(10.0)
    assert ids(index, Query())[-2:] == [12, 13]
    index.close()


def test_an_index_of_another_version_is_built_again(path, index):
    index.close()
    database = sqlite3.connect(path.with_name("samples.jsonl.index"))
    database.execute("PRAGMA user_version = 99")
    database.execute("DROP TABLE samples")
    database.close()
    again = SampleIndex(path)
    again.extend(10.0)
    assert len(ids(again, Query())) == 12
    again.close()


def test_a_folder_without_write_access_has_an_index_in_memory(path):
    os.mkdir(path.with_name("samples.jsonl.index"))  # a file cannot be created there
    index = SampleIndex(path)
    index.extend(10.0)
    assert len(ids(index, Query())) == 12
    index.close()


def test_two_programs_extend_one_index(path):
    first, second = SampleIndex(path), SampleIndex(path)
    first.extend(10.0)
    write(path, [sample(12)])
    second.extend(10.0)
    write(path, [sample(13)])
    first.extend(10.0)
    assert ids(first, Query()) == ids(second, Query()) == list(range(1, 15))
    first.close()
    second.close()


def test_groups_have_mean_and_spread_of_rewards(path):
    write(path, [sample(12, reward=1.0), sample(13, reward=1.0)])
    index = SampleIndex(path)
    index.extend(10.0)
    groups = index.groups(Query({"step": (3, 4)}, order="spread"), skip=0, limit=9)
    assert [(group["group"], group["count"], group["mean"], group["spread"]) for group in groups] == [
        (6, 2, 1.0, 0.0),
        (4, 2, 0.5, 1.0),
        (5, 2, 0.5, 1.0),
    ]
    index.close()


def test_a_histogram_counts_by_step_and_value(index):
    found = index.histogram(Query({"step": (1, 2)}), "reward")
    assert (found["low"], found["high"], found["first"], found["last"], found["steps"]) == (0.0, 1.0, 1, 2, 2)
    assert found["counts"] == [(0, 0, 2), (0, 23, 2), (1, 0, 2), (1, 23, 2)]
    assert index.histogram(Query({"step": (99, None)}), "reward") == {"counts": []}


def test_a_sample_is_read_by_its_number(index):
    row = index.row(3)
    assert row == {"number": 3, **sample(2), "prompt_number": row["prompt_number"]}
    with pytest.raises(KeyError):
        index.row(99)
