"""Images in a chat: answers equal to transformers' processor and model, saved and loaded rows, errors."""

import json
from pathlib import Path

import pytest
import torch
from chat_fakes import ScriptedScreen
from picture_rows import encoded
from PIL import Image
from tiny_vision import save_tiny_vision
from transformers import AutoModelForImageTextToText, AutoProcessor

from rlhf_cli.commands.chat import ChatConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.chat.commands import Attach, reply_to
from rlhf_cli.runs.chat.files import shown_picture
from rlhf_cli.runs.chat.run import run_chat
from rlhf_cli.runs.chat.session import Ask, Session


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_vision("idefics3", folder / "model", splits=True)
    (folder / "a.png").write_bytes(encoded(80, 120))
    (folder / "b.png").write_bytes(encoded(56, 56, seed=1))
    return folder


def talk(pretrain: Path, *lines: str) -> ScriptedScreen:
    """Chat with these lines and return the screen."""
    given = {"pretrain": str(pretrain), "param_dtype": "fp32", "max_new_tokens": 8, "temperature": 0}
    screen = ScriptedScreen(*lines)
    run_chat(build_config(ChatConfig, given), open_screen=lambda: screen)
    return screen


def answers(screen: ScriptedScreen) -> list[str]:
    return [answer[1] for answer in screen.answers]


def plain_answer(folder: Path, text: str, pictures: list[str]) -> str:
    """Return the answer of the model of transformers with its own processor."""
    processor = AutoProcessor.from_pretrained(folder / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    images = [Image.open(folder / name) for name in pictures]
    inputs = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(ids, skip_special_tokens=True))


def test_answers_are_those_of_transformers_own_processor_and_model(folder: Path) -> None:
    lines = (f"/image {folder / 'a.png'}", f"/image {folder / 'b.png'}", "Which?", "/clear", "Which?")
    screen = talk(folder / "model", *lines)
    both, neither = answers(screen)
    text = "<|im_start|>user\n{}Which?<|im_end|>\n<|im_start|>assistant\n"
    assert both == plain_answer(folder, text.format("<image>" * 2), ["a.png", "b.png"])
    assert neither != both
    assert f"attached {folder / 'a.png'} (120 x 80 pixels) to the next message" in screen.told


def test_a_saved_conversation_has_its_pictures_and_goes_on_as_it_would_have(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.jsonl"
    lines = (f"/image {folder / 'a.png'}", "Which?", f"/save {saved}", "And now?")
    first = answers(talk(folder / "model", *lines))
    row = json.loads(saved.read_text())
    assert row["images"] == [str(folder / "a.png")]
    assert row["messages"][0] == {"role": "user", "content": "<image>Which?"}
    assert answers(talk(folder / "model", f"/load {saved}", "/retry", "And now?")) == first


def test_a_model_of_text_refuses_pictures(tiny_model_dir: str, folder: Path, tmp_path: Path) -> None:
    row = {"prompt": "Which?", "response": "this", "images": [str(folder / "a.png")]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    screen = talk(Path(tiny_model_dir), f"/image {folder / 'a.png'}", f"/load {tmp_path / 'rows.jsonl'}")
    assert screen.faults[0] == f"/image: {tiny_model_dir} does not support images, or has no chat template"
    assert "images" in screen.faults[1]


def test_pictures_wait_for_the_next_message_and_can_be_dropped(folder: Path) -> None:
    assert reply_to(Session(), "/image a b.png").action == Attach(Path("a b.png"))
    session = Session(attached=(shown_picture("a.png", folder), shown_picture("b.png", folder)))
    assert reply_to(session, "/image").text == f"images in the next message: {folder / 'a.png'}, {folder / 'b.png'}"
    ask = reply_to(session, "Which?").action
    assert isinstance(ask, Ask)
    assert ask == Ask("\ufffc\ufffcWhich?", pictures=session.attached)
    after = session.answered(ask, ["this"])
    assert after.attached == ()
    assert reply_to(after, "/retry").action == Ask(ask.message, attempt=1, again=True, pictures=session.attached)
    assert reply_to(after, "/undo").text == "removed '[image] [image] Which?' and the answer"
    assert reply_to(session, "/image off").session.attached == ()
    with pytest.raises(UsageError, match=r"contains U\+FFFC"):
        reply_to(session, "a \ufffc b")
    for name, why in (("none.png", "is not there"), ("model", "is not there")):
        with pytest.raises(UsageError, match=f"the image {name} {why}"):
            shown_picture(name, folder)
