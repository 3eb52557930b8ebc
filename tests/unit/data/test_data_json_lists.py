"""JSON lists are read through a window: its size changes no results, and memory does not grow with the file."""

import json
import mmap
import tracemalloc

import pytest

from rlhf_cli.data.reading.files import read_file
from rlhf_cli.data.reading.json_lists import LONGEST_WORD, WINDOW, element_bounds
from rlhf_cli.errors import UsageError

WINDOWS = [8, 9, 10, 11, 13, 17, 22, 34, 90]
ROWS = [
    {"prompt": "é 漢 😀 \u2028", "n": [-12.5e-3, True, None]},
    {},
    {"a": {"b": ["]", "}, {", '\\"']}, "c": "x" * 90},
    {"d": "\ud83d", "e": -1.0},
]


def bounds_of(path, window):
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return list(element_bounds(mapped, "rows.json", window=window))


def pretty(rows, **settings):
    return json.dumps(rows, **settings).encode(errors="surrogatepass")


WHOLE = {
    "on one line": pretty(ROWS),
    "on many lines": b"\xef\xbb\xbf \n" + pretty(ROWS, indent=3) + b"\n" * 50,
    "not escaped": pretty(ROWS[:3], ensure_ascii=False),
    "far apart": b"[" + b" " * 99 + b"{}" + b"\n" * 99 + b"," + b"\t" * 99 + b'{"a": 1}' + b" " * 99 + b"]",
}


@pytest.mark.parametrize("name", WHOLE)
def test_rows_are_those_that_a_parser_of_the_whole_file_gives(name, tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(WHOLE[name])
    expected = json.loads(WHOLE[name].decode("utf-8-sig"))
    table = read_file(path)
    assert [table.read(number) for number in range(table.num_rows)] == expected
    starts = bounds_of(path, WINDOW)
    assert all(WHOLE[name][start : start + 1] == b"{" for start in starts[:-1])
    for window in WINDOWS:
        assert bounds_of(path, window) == starts, window


MALFORMED = [
    b'[{"a": "1\n"}, {}]',
    b'[{"a": tru}, {"b": 1}]',
    b'[{"a": -Infinit}, {}]',
    b'[{"a": "\\u12"}, {}]',
    b'[{"a": "\\x"}, {}]',
    b'[{"a": 1.}, {}]',
    b'[{"a" 1}, {}]',
    b"[{a: 1}, {}]",
    b'[{"a": 1,}, {}]',
    b'[{"a": 1}; {}]',
    b'[{"a": 1}, 1234567890123456789012345678901234567890]',
    b'[{"a": 1}, "a text that is longer than the first windows"]',
    b'[{"a": 1}, tru]',
    b'[{"a": "without an end}, {}]',
    b'[{"a": 1}',
    b'[{"a": 1},',
    b'[{"a": 1},]',
    b'[{"a": 1}] {',
    '[\n{"é": "漢字"},\n{"漢字": "😀" 1}\n]'.encode(),
    '\ufeff[{"é": "漢字"}, {"漢字": "😀" 1}]'.encode(),
    '[{"é": "漢字"}, {"漢字": "'.encode() + b'\xff"}]',
    '[{"é": "漢字"}, {"漢字": "漢'.encode()[:-1],
]


@pytest.mark.parametrize("content", MALFORMED)
@pytest.mark.parametrize("padding", [b"", b"\n" + b" " * 70])
def test_faults_are_named_alike_by_every_window(content, padding, tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(content.replace(b"{", padding + b"{") + padding)
    said = set()
    for window in [*WINDOWS, WINDOW]:
        with pytest.raises(UsageError) as caught:
            bounds_of(path, window)
        said.add(str(caught.value))
    assert len(said) == 1


def test_line_and_column_of_a_fault_are_those_of_a_parser_of_the_whole_file(tmp_path):
    path = tmp_path / "rows.json"
    long = "é" * (WINDOW - 5)
    for text in (f'[{{"a": "{long}"}}, {{"漢": 1 "b"}}]', f'[{{"a": "{long}"}},\n{{"a": 1}},\n {{"漢": 1 "b"}}]'):
        with pytest.raises(json.JSONDecodeError) as expected:
            json.loads(text)
        for mark in ("", "\ufeff"):
            path.write_text(mark + text, encoding="utf-8")
            with pytest.raises(UsageError) as caught:
                read_file(path)
            assert str(caught.value) == (
                f"{path} line {expected.value.lineno} is not valid JSON: {expected.value.msg} "
                f"at column {expected.value.colno}"
            )


def test_byte_that_is_no_utf8_is_named_by_its_place_in_the_file(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'\xef\xbb\xbf[{"a": "' + b"x" * WINDOW + b'\xe9"}]')
    with pytest.raises(UsageError, match=f"is not UTF-8 text: .* at byte {3 + 8 + WINDOW}$"):
        read_file(path)


@pytest.mark.parametrize("text", ["x" * 90_000, "漢" * 30_000])
def test_memory_does_not_grow_with_the_file(text, tmp_path):
    path, num_rows = tmp_path / "rows.json", 350
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        file.writelines(f'{{"a": "{text}", "i": {i}}},\n' for i in range(num_rows))
        file.write("{}]")
    assert path.stat().st_size > 30 * WINDOW
    tracemalloc.start()
    try:
        table = read_file(path)
        assert [table.read(i)["i"] for i in range(num_rows)] == list(range(num_rows))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert table.num_rows == num_rows + 1
    assert peak < 6 * WINDOW


def test_a_fault_in_a_large_file_is_found_without_reading_on(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1 2' + b" " * LONGEST_WORD + b"x" * 30 * WINDOW)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="line 1 is not valid JSON: Expecting ',' delimiter at column 10"):
            read_file(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * WINDOW
