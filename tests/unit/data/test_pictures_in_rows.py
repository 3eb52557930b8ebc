"""Images in rows: their position in messages and tokens, and rejected rows."""

import base64
import pickle
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from picture_rows import (
    encoded,
    pairs_of,
    pixels_of_file,
    prompts_of,
    reader_of,
    sequences_of,
    square_family,
    write_rows,
)

from rlhf_cli.data.pictures.reading import NUM_THREADS, made_in_order
from rlhf_cli.errors import RunError, UsageError

TOKENIZER, FAMILY = square_family()
READER = reader_of(FAMILY)
START, STOP = "<|vision_start|>", "<|vision_end|>"
A, B = START + "<|image_pad|>" * 2 + STOP, START + "<|image_pad|>" + STOP
"""The images a.png and b.jpg as text."""


PART = {"type": "image"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def texts(data: Any) -> list[str]:
    return [TOKENIZER.decode(sequence.token_ids.tolist()) for sequence in data.items]


def turn(asked: str, answer: str = "red") -> str:
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "EasyR1's": ({"images": ["a.png"], "problem": "<image>How many?", "answer": "red"}, f"{A}How many?"),
    "two marks": ({"images": ["a.png", "b.jpg"], "prompt": "<image> or <image>?", "answer": "red"}, f"{A} or {B}?"),
    "TRL's": ({"images": ["a.png"], "messages": [user("How many?"), assistant("red")]}, f"{A}How many?"),
    "TRL's parts": (
        {
            "images": ["b.jpg", "a.png"],
            "messages": [
                user([{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]),
                assistant("red"),
            ],
        },
        f"{B}or{A}",
    ),
    "LLaVA's": (
        {
            "image": "b.jpg",
            "conversations": [{"from": "human", "value": "<image>\nColour?"}, {"from": "gpt", "value": "red"}],
        },
        f"{B}\nColour?",
    ),
    "Qwen's parts": (
        {"messages": [user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]), assistant("red")]},
        f"{A}?",
    ),
    "OpenAI's parts": (
        {
            "messages": [
                user([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "b.jpg"}}]),
                assistant("red"),
            ]
        },
        f"?{B}",
    ),
    "addresses in cells": (
        {"images": [{"url": "a.png"}, {"image": "b.jpg", "path": None}], "prompt": "Which?", "answer": "red"},
        f"{A}{B}Which?",
    ),
    "base64 in parts": (
        {
            "messages": [
                user([{"type": "image", "base64": base64.b64encode(encoded(28, 56)).decode()}]),
                assistant("red"),
            ]
        },
        A,
    ),
    "no picture": ({"images": [], "prompt": "How many?", "answer": "red"}, "How many?"),
    "null": ({"images": None, "prompt": "How many?", "answer": "red"}, "How many?"),
    "no column": ({"prompt": "How many?", "answer": "red"}, "How many?"),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_picture_stands_at_its_mark_in_its_own_tokens(name: str, tmp_path: Path) -> None:
    row, asked = ROWS[name]
    data = sequences_of(write_rows(tmp_path, row), TOKENIZER, READER)
    assert texts(data) == [turn(asked)]
    sequence = data.items[0]
    trained = TOKENIZER.decode(sequence.token_ids[sequence.loss_mask].tolist())
    assert trained == "red<|im_end|>"
    for placed in sequence.pictures:
        assert set(sequence.token_ids[placed.start : placed.stop].tolist()) == {FAMILY.image_token}
        grid = placed.grid or (0, 0)
        assert grid[0] * grid[1] == placed.length


def test_rows_with_and_without_pictures_keep_their_order_and_pixels(tmp_path: Path) -> None:
    rows = [{"prompt": "How to write <image>?", "answer": "red"}, ROWS["two marks"][0], ROWS["null"][0]]
    data = sequences_of(write_rows(tmp_path, *rows), TOKENIZER, READER)
    assert texts(data)[0] == turn("How to write <image>?")
    assert [len(sequence.pictures) for sequence in data.items] == [0, 2, 0]
    assert data.patches is not None
    assert data.patches.tolist() == [sequence.patches for sequence in data.items] == [0, 4 * (2 + 1), 0]
    for placed, name in zip(data.items[1].pictures, ("a.png", "b.jpg"), strict=True):
        np.testing.assert_array_equal(placed.picture.pixels, pixels_of_file(tmp_path / name))


def parquet(folder: Path, *rows: dict[str, Any]) -> Path:
    pa.parquet.write_table(pa.Table.from_pylist(list(rows)), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_bytes_in_parquet_are_pictures_as_files_are(tmp_path: Path) -> None:
    write_rows(tmp_path)
    contents = (tmp_path / "a.png").read_bytes()
    path = parquet(
        tmp_path,
        {"images": [{"bytes": contents, "path": None}], "problem": "<image>How many?", "answer": "red"},
        {"images": [{"bytes": None, "path": "b.jpg"}], "problem": "<image>How many?", "answer": "red"},
        {"images": [], "problem": "How many?", "answer": "red"},
    )
    data = sequences_of(path, TOKENIZER, READER)
    assert texts(data) == [turn(f"{A}How many?"), turn(f"{B}How many?"), turn("How many?")]
    named = sequences_of(write_rows(tmp_path, ROWS["EasyR1's"][0]), TOKENIZER, READER)
    assert named.items[0].pictures == data.items[0].pictures


def test_verls_rows_are_prompts_with_pictures(tmp_path: Path) -> None:
    contents = encoded(28, 56)
    row = {
        "data_source": "geo3k",
        "prompt": [user("<image>Find x.")],
        "images": [{"bytes": contents}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    data = prompts_of(parquet(tmp_path, row), TOKENIZER, READER)
    prompt = data.prompts[0]
    assert prompt.label == "3"
    assert TOKENIZER.decode(prompt.prompt_ids) == f"<|im_start|>user\n{A}Find x.<|im_end|>\n<|im_start|>assistant\n"
    assert [(placed.start, placed.length) for placed in prompt.pictures] == [
        (prompt.prompt_ids.index(FAMILY.image_token), 2)
    ]
    other = prompts_of(parquet(tmp_path, row | {"images": [{"bytes": encoded(28, 56, seed=5)}]}), TOKENIZER, READER)
    assert other.prompts[0].prompt_ids == prompt.prompt_ids
    assert other.fingerprint != data.fingerprint
    assert other.prompts[0].pictures != prompt.pictures


def test_the_picture_of_a_pair_is_part_of_its_prompt(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"images": ["a.png"], "prompt": "<image>How many?", "chosen": "two", "rejected": "ten"})
    pair = pairs_of(path, TOKENIZER, READER).items[0]
    assert A in TOKENIZER.decode(pair.prompt_ids.tolist())
    (placed,) = pair.pictures
    assert pair.prompt_ids[placed.start : placed.stop].tolist() == [FAMILY.image_token] * 2


ASKED = {"images": ["a.png"], "prompt": "<image>How many?", "answer": "red"}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (ASKED | {"images": ["c.png"]}, r"picture 1 \(c\.png\) is not there: no file '.*c\.png' \(--image_dir"),
    "web": (ASKED | {"images": ["https://x.org/a.png"]}, "picture 1 .* is on the web: nothing is downloaded"),
    "no base64": (ASKED | {"images": ["data:image/png;base64,??"]}, "picture 1 .* is no base64 text"),
    "number": (ASKED | {"images": [7]}, "picture 1 is neither a path nor bytes: 7;"),
    "text file": (ASKED | {"images": ["rows.jsonl"]}, "is no picture in a format that is read"),
    "too few": (ASKED | {"images": []}, "1 mark in the messages, but 0 pictures in column 'images'"),
    "too many": (ASKED | {"images": ["a.png", "b.jpg"]}, "1 mark in the messages, but 2 pictures"),
    "two columns": (ASKED | {"image": "b.jpg"}, "images and image both have pictures: choose one with --image_key"),
    "own placeholder": (
        ASKED | {"prompt": "<image>What is <|image_pad|>?"},
        r"message 1 has <\|image_pad\|> in its text, which stands for a picture",
    ),
    "own placeholder without a picture": (
        {"prompt": "<|image_pad|>?", "answer": "red"},
        "has <.image_pad.> in its text",
    ),
    "own mark": (ASKED | {"prompt": "<image> \ufffc?"}, "message 1 has the character U.FFFC in its text"),
    "assistant's mark": (ASKED | {"answer": "<image>"}, "message 2 from assistant has the mark <image>"),
    "assistant's part": (
        {"messages": [user("Draw."), {"role": "assistant", "content": [{"type": "image"}]}]},
        "message 2 from assistant has a picture",
    ),
    "plain text": ({"text": "What?", "images": ["a.png"]}, "column 'images' has pictures, and plain text has no place"),
    "nine": (
        ASKED | {"images": ["a.png"] * 9, "prompt": "<image>" * 9},
        "9 pictures are more than max_images_per_prompt 8",
    ),
    "video": (ASKED | {"videos": ["a.mp4"]}, "column 'videos' is not empty, but no videos are read"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_rows_whose_pictures_cannot_be_used_are_refused_by_file_and_line_or_dropped(name: str, tmp_path: Path) -> None:
    row, reason = FAULTS[name]
    before = {"text": "fine"} if "text" in row else ROWS["no column"][0] if "prompt" in row else ROWS["Qwen's parts"][0]
    path = write_rows(tmp_path, before, row)
    with pytest.raises(UsageError, match=reason) as caught:
        sequences_of(path, TOKENIZER, READER)
    assert f"{path} line 2: " in str(caught.value)
    dropped = sequences_of(path, TOKENIZER, READER, invalid_rows="drop")
    assert (len(dropped.items), dropped.report.dropped_invalid) == (1, 1)


def test_marks_without_any_column_of_pictures_are_refused_with_the_columns_that_there_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"photo": "a.png", "prompt": "<image>How many?", "answer": "red"})
    with pytest.raises(UsageError, match=r"line 1: message 1 has the mark <image>, .* columns present: photo, prompt"):
        sequences_of(path, TOKENIZER, READER)
    with path.open("a") as rows:
        rows.write('{"prompt": "How to write <image>?", "answer": "red"}\n')
    named = sequences_of(path, TOKENIZER, reader_of(FAMILY, image_key="photo"))
    assert [len(sequence.pictures) for sequence in named.items] == [1, 0]


def test_pictures_for_a_model_of_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1: column 'images' is not empty, but only text is read for this model"):
        sequences_of(write_rows(tmp_path, ASKED), TOKENIZER, None)
    with pytest.raises(UsageError, match="line 1: its messages have pictures, but only text is read for this model"):
        sequences_of(write_rows(tmp_path, ROWS["Qwen's parts"][0]), TOKENIZER, None)
    with pytest.raises(UsageError, match="line 1: its messages have pictures"):
        prompts_of(write_rows(tmp_path, {"prompt": [user([{"type": "image", "image": "a.png"}])]}), TOKENIZER, None)


def test_a_sequence_is_never_cut_inside_a_picture(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {
        "images": ["a.png", "a.png"],
        "messages": [user("<image>?"), assistant("red"), user("<image>?"), assistant("red")],
    })  # fmt: skip
    whole = sequences_of(path, TOKENIZER, READER).items[0]
    second = whole.pictures[1]
    for max_len in range(second.start - 1, second.stop + 2):
        cut = sequences_of(path, TOKENIZER, READER, max_len=max_len).items[0]
        inside = second.start < max_len < second.stop
        assert len(cut) == (second.start if inside else max_len)
        assert len(cut.pictures) == (2 if max_len >= second.stop else 1)
        np.testing.assert_array_equal(cut.token_ids, whole.token_ids[: len(cut)])


def test_prompts_are_as_long_as_with_their_pictures(tmp_path: Path) -> None:
    row = {"images": ["big.png"], "prompt": "<image>?"}
    path = write_rows(tmp_path, {"prompt": "?"}, row)
    (tmp_path / "big.png").write_bytes(encoded(112, 112))
    (short, long) = [len(prompt.prompt_ids) for prompt in prompts_of(path, TOKENIZER, READER).prompts]
    assert long == short + 2 + 16
    data = prompts_of(path, TOKENIZER, READER, max_len=16 + long - 1)
    assert (len(data.prompts), data.report.dropped_overlong) == (1, 1)


def test_prompts_with_broken_pictures_are_dropped_and_counted(tmp_path: Path) -> None:
    row = {"images": ["a.png"], "prompt": "<image>?"}
    path = write_rows(tmp_path, row, row | {"images": ["c.png"]}, row | {"images": []}, row | {"images": ["b.jpg"]})
    with pytest.raises(UsageError, match=r"line 2: picture 1 \(c\.png\) is not there"):
        prompts_of(path, TOKENIZER, READER)
    data = prompts_of(path, TOKENIZER, READER, invalid_rows="drop")
    assert [prompt.index for prompt in data.prompts] == [0, 3]
    assert [prompt.pictures[0].picture.width for prompt in data.prompts] == [56, 28]
    assert data.report.dropped_invalid == 2


@pytest.mark.parametrize("setting", ["prompt_template", "format_prompt"])
def test_pictures_keep_their_places_under_templates_of_prompts(setting: str, tmp_path: Path) -> None:
    row = {"images": ["a.png", "b.jpg"], "prompt": "<image>or <image>? "}
    template = tmp_path / "mine.jinja"
    name = {"prompt_template": "prompt", "format_prompt": "content"}[setting]
    template.write_text(f"Look. {{{{ {name} | trim }}}} Think first.")
    (prompt,) = prompts_of(write_rows(tmp_path, row), TOKENIZER, READER, **{setting: str(template)}).prompts
    question = f"Look. {A}or {B}? Think first."
    turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(prompt.prompt_ids) == (question if setting == "prompt_template" else turn)
    for placed in prompt.pictures:
        assert set(prompt.prompt_ids[placed.start : placed.stop]) == {FAMILY.image_token}
    assert [placed.length for placed in prompt.pictures] == [2, 1]
    template.write_text(f"{{{{ {name} }}}} again: {{{{ {name} }}}}")
    with pytest.raises(UsageError, match=f"line 1: {setting} has 4 marks for the 2 pictures of the question"):
        prompts_of(write_rows(tmp_path, row), TOKENIZER, READER, **{setting: str(template)})


def test_with_every_token_trained_pictures_are_not(tmp_path: Path) -> None:
    data = sequences_of(write_rows(tmp_path, ROWS["two marks"][0]), TOKENIZER, READER, pretrain_mode=True)
    sequence = data.items[0]
    is_picture = sequence.token_ids == FAMILY.image_token
    np.testing.assert_array_equal(sequence.loss_mask, ~is_picture & (np.arange(len(sequence)) > 0))


def test_a_file_that_changed_since_it_was_read_ends_the_run(tmp_path: Path) -> None:
    data = sequences_of(write_rows(tmp_path, ASKED), TOKENIZER, READER)
    (tmp_path / "a.png").write_bytes(encoded(28, 56, seed=9))
    with pytest.raises(RunError, match=r"picture .*a\.png was changed since the data were read"):
        _ = data.items[0].pictures[0].picture.pixels
    (tmp_path / "a.png").unlink()
    with pytest.raises(RunError, match=r"picture .*a\.png cannot be read any more: No such file"):
        _ = data.items[0].pictures[0].picture.pixels


@pytest.mark.parametrize("form", ["path", "bytes"])
def test_a_picture_travels_encoded_and_needs_its_file_no_more(form: str, tmp_path: Path) -> None:
    large = encoded(112, 112, form="JPEG")
    (tmp_path / "large.jpg").write_bytes(large)
    cell = {"path": "large.jpg"} if form == "path" else {"bytes": large}
    data = sequences_of(parquet(tmp_path, {"images": [cell], "prompt": "<image>?", "answer": "red"}), TOKENIZER, READER)
    picture = data.items[0].pictures[0].picture
    message = pickle.dumps([picture, picture])
    assert len(message) < len(large) + 1000 < picture.pixels.nbytes
    expected = picture.pixels
    (tmp_path / "large.jpg").unlink()
    first, second = pickle.loads(message)
    assert first is second
    np.testing.assert_array_equal(first.pixels, expected)


def test_a_file_that_changed_is_named_before_it_travels(tmp_path: Path) -> None:
    data = sequences_of(write_rows(tmp_path, ASKED), TOKENIZER, READER)
    (tmp_path / "a.png").write_bytes(encoded(28, 56, seed=9))
    with pytest.raises(RunError, match=r"picture .*a\.png was changed since the data were read"):
        pickle.dumps(data.items[0])


def test_paths_begin_in_the_named_folder_and_pictures_come_from_the_named_column(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    write_rows(tmp_path / "pictures")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"photo": "a.png", "prompt": "<image>How many?", "answer": "red"}\n')
    reader = reader_of(FAMILY, image_dir=str(tmp_path / "pictures"), image_key="photo")
    assert texts(sequences_of(path, TOKENIZER, reader)) == [turn(f"{A}How many?")]
    with pytest.raises(
        UsageError, match=r"rows\.jsonl: no column 'foto' \(--image_key\); columns present: photo, prompt"
    ):
        sequences_of(path, TOKENIZER, reader_of(FAMILY, image_key="foto"))


def test_kept_data_are_read_again_once_a_picture_has_changed(tmp_path: Path) -> None:
    path, kept = write_rows(tmp_path, ASKED), {"data_cache": str(tmp_path / "kept")}
    first = sequences_of(path, TOKENIZER, READER, **kept)
    assert len(list((tmp_path / "kept").glob("*.arrow"))) == 1
    again = sequences_of(path, TOKENIZER, READER, **kept)
    assert again.items[0].pictures == first.items[0].pictures
    assert again.fingerprint() == first.fingerprint()
    (tmp_path / "a.png").write_bytes(encoded(56, 56, seed=9))
    changed = sequences_of(path, TOKENIZER, READER, **kept)
    assert changed.items[0].pictures[0].length == 4
    assert changed.fingerprint() != first.fingerprint()


def test_threads_keep_the_order_and_raise_the_first_fault() -> None:
    failed = Event()

    def step(number: int) -> int:
        if number == 1:
            failed.set()
            raise ValueError("the second")
        if number == 0:
            assert NUM_THREADS == 1 or failed.wait(60)
            raise ValueError("the first")
        return number * number

    assert made_in_order(step, [3, 2, 5]) == [9, 4, 25]
    with pytest.raises(ValueError, match="the first"):
        made_in_order(step, [2, 0, 1])
