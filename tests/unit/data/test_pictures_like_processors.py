"""Rows of other tools give the same tokens as the model family's own processor."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from picture_rows import encoded, prompts_of, reader_of, sequences_of, write_rows
from PIL import Image
from tiny_vision import save_tiny_vision
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from rlhf_cli.models.vision.families.table import find_family

PART = {"type": "image"}
QUESTION, ANSWER = "How many squares?", "two"


@pytest.fixture(scope="module", params=["idefics3", "llava"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision(request.param, folder, splits=True)
    write_rows(folder)
    (folder / "large.png").write_bytes(encoded(90, 200))
    return folder


def loaded(folder: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    family = find_family(str(folder), AutoConfig.from_pretrained(folder), tokenizer)
    return tokenizer, reader_of(family)


def expected(folder: Path, content: list[dict[str, str]], names: list[str], *, answer: str | None) -> list[int]:
    """Return the tokens that the model's processor makes of a user message with several parts, and the answer."""
    processor = AutoProcessor.from_pretrained(folder)
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if answer is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    text = processor.apply_chat_template(messages, add_generation_prompt=answer is None, tokenize=False)
    pictures = [Image.open(folder / name).convert("RGB") for name in names]
    made = processor(text=[text], images=[pictures], add_special_tokens=False)
    ids: list[int] = made["input_ids"][0]
    return ids


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ROWS: dict[str, tuple[dict[str, Any], list[dict[str, str]], list[str]]] = {
    "EasyR1's": (
        {"images": ["large.png"], "problem": f"<image>{QUESTION}", "answer": ANSWER},
        [PART, text(QUESTION)],
        ["large.png"],
    ),
    "TRL's": (
        {
            "images": ["a.png", "large.png"],
            "messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}],
        },
        [PART, PART, text(QUESTION)],
        ["a.png", "large.png"],
    ),
    "LLaVA's": (
        {
            "image": "b.jpg",
            "conversations": [{"from": "human", "value": f"{QUESTION}\n<image>"}, {"from": "gpt", "value": ANSWER}],
        },
        [text(f"{QUESTION}\n"), PART],
        ["b.jpg"],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_to_train_on_are_the_tokens_of_the_processor(name: str, folder: Path) -> None:
    row, content, names = ROWS[name]
    tokenizer, reader = loaded(folder)
    path = write_rows(folder, row)
    data = sequences_of(path, tokenizer, reader)
    assert data.items[0].token_ids.tolist() == expected(folder, content, names, answer=ANSWER)


def test_verls_prompts_are_the_tokens_of_the_processor(folder: Path) -> None:
    tokenizer, reader = loaded(folder)
    row = {
        "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
        "images": [{"bytes": (folder / "large.png").read_bytes(), "path": None}],
        "reward_model": {"ground_truth": ANSWER},
    }
    pa.parquet.write_table(pa.Table.from_pylist([row]), folder / "rows.parquet")
    prompt = prompts_of(folder / "rows.parquet", tokenizer, reader).prompts[0]
    assert prompt.prompt_ids == expected(folder, [PART, text(QUESTION)], ["large.png"], answer=None)
