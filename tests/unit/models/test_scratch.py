"""Small untrained models load like other models and tokenise numbers digit by digit."""

import json

import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from rlhf_cli.commands.scratch import ScratchConfig
from rlhf_cli.config.scratch import ArchitectureConfig, ScratchConfigGroup, VisionTowerConfig
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.dialogue import ChatDialogue
from rlhf_cli.models.scratch import (
    new_model,
    new_processor,
    new_vision_model,
    save_new_model,
    texts_in,
    train_tokenizer,
)
from rlhf_cli.runs.scratch import run_scratch

SMALL = ArchitectureConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
TEXTS = ["Anna has 12 apples and buys 305 more.", "How many does she have? She has 317 apples."] * 20
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "look up",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "integer"}},
                "required": ["city", "day"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}},
]
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "day": 2}}}]
ASKED = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    path = tmp_path_factory.mktemp("scratch") / "model"
    save_new_model(new_model(SMALL, tokenizer, seed=1), tokenizer, path)
    return path


def test_numbers_are_read_digit_by_digit(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("12+305") == ["1", "2", "+", "3", "0", "5"]


def test_a_reloaded_tokenizer_gives_the_same_tokens(folder):
    fresh, reloaded = train_tokenizer(TEXTS, vocab_size=400), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS[:2], "naïve café, 99 %", "  two  spaces\n\nand lines", "<|im_start|>user\nhi<|im_end|>\n"]:
        assert reloaded(text)["input_ids"] == fresh(text)["input_ids"]
        assert reloaded.decode(reloaded(text)["input_ids"]) == text


def test_any_text_can_be_encoded(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("数学 🙂")["input_ids"]) == "数学 🙂"


def test_generation_stops_at_the_end_of_a_turn(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.decode([model.generation_config.eos_token_id]) == "<|im_end|>"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False).endswith("assistant\nyes<|im_end|>\n")


def test_the_seed_decides_the_weights():
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    first, same, other = (new_model(SMALL, tokenizer, seed=seed).model.embed_tokens.weight for seed in (1, 1, 2))
    assert first.equal(same)
    assert not first.equal(other)


def test_the_spread_of_the_weights_can_be_chosen():
    wide = SMALL.model_copy(update={"initializer_range": 0.2})
    spreads = [
        new_model(shape, train_tokenizer(TEXTS, vocab_size=400), seed=1).lm_head.weight.float().std().item()
        for shape in (SMALL, wide)
    ]
    assert spreads == pytest.approx([0.02, 0.2], rel=0.05)


def test_texts_of_messages_are_found():
    row = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], "n": 3, "t": "x"}
    assert list(texts_in(row)) == ["user", "one", "assistant", "two", "x"]


def test_all_files_are_as_readable_as_the_folder(folder):
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert set(modes.values()) == {folder.stat().st_mode & 0o666}
    assert "model.safetensors" in modes


def test_a_model_for_pictures_loads_and_sees_them(tmp_path):
    tower = VisionTowerConfig(image_size=56, vision_hidden_size=48)
    tokenizer = train_tokenizer(TEXTS, vocab_size=400, takes_images=True)
    model = new_vision_model(SMALL, tower, tokenizer, seed=1)
    save_new_model(model, new_processor(tower, tokenizer), tmp_path / "model")
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    parts = [{"type": "image"}, {"type": "text", "text": "How many apples?"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    assert text == "<|im_start|>user\n<image>How many apples?<|im_end|>\n<|im_start|>assistant\n"
    red, blue = (Image.new("RGB", (56, 56), colour) for colour in ("red", "blue"))
    inputs = [processor(text=text, images=[[image]], return_tensors="pt") for image in (red, blue)]
    assert (inputs[0]["input_ids"] == loaded.config.image_token_id).sum() == tower.num_image_tokens == 4
    logits = [loaded(**one).logits for one in inputs]
    assert not torch.equal(logits[0], logits[1])


def test_a_template_for_pictures_takes_plain_text_too():
    plain, with_images = (train_tokenizer(TEXTS, vocab_size=400, takes_images=takes) for takes in (False, True))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert plain.apply_chat_template(chat, tokenize=False) == with_images.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("given", [{"image_size": 50}, {"image_size": 56, "vision_hidden_size": 50}])
def test_towers_whose_parts_do_not_divide_are_refused(given):
    with pytest.raises(ValidationError, match="must be a multiple of"):
        VisionTowerConfig(**given)


def tokenizer_with_tools():
    return train_tokenizer(TEXTS, vocab_size=400, takes_tools=True)


def test_a_template_for_tools_takes_plain_text_too():
    plain, with_tools = train_tokenizer(TEXTS, vocab_size=400), tokenizer_with_tools()
    for chat in ([*ASKED, {"role": "assistant", "content": "ho"}], ASKED[1:]):
        texts = [
            one.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for one in (plain, with_tools)
        ]
        assert texts[0] == texts[1]


def test_a_template_for_tools_lists_them_and_shows_calls_and_results_as_the_qwen_family_does():
    turns = [
        {"role": "assistant", "content": "", "tool_calls": CALLS * 2},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "mild"},
        {"role": "assistant", "content": "sunny and mild"},
    ]
    text = tokenizer_with_tools().apply_chat_template(ASKED + turns, tools=TOOLS, tokenize=False)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "day": 2}}\n</tool_call>'
    assert text == (
        "<|im_start|>system\nshort\nweather(city, day)\nnow()\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nmild\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nsunny and mild<|im_end|>\n"
    )


def test_marks_of_calls_are_tokens_that_are_read_as_text(tmp_path):
    tokenizer = tokenizer_with_tools()
    save_new_model(new_model(SMALL, tokenizer, seed=1), tokenizer, tmp_path / "model")
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "<tool_call>\n12\n</tool_call><tool_response>3</tool_response>"
    assert reloaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert reloaded.tokenize(text)[0] == "<tool_call>"
    assert reloaded.decode(reloaded(text)["input_ids"], skip_special_tokens=True) == text


def test_calls_in_the_notation_of_the_template_are_read_back():
    tokenizer = tokenizer_with_tools()
    template = ChatTemplate(tokenizer)
    dialogue = ChatDialogue(template, tokenizer, TOOLS, end_ids=[tokenizer.eos_token_id], vocab_size=len(tokenizer))
    calls = [dialogue.read(dialogue.written(turn)).calls for turn in dialogue.example_calls()]
    assert calls == [(ToolCall("weather", {"city": "1", "day": 1}),), (ToolCall("now", {}),)]


@pytest.mark.parametrize("has_tools", [True, False])
def test_the_template_has_calls_if_a_row_has_tools(tmp_path, has_tools):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [{"messages": chat}, {"messages": chat, **({"tools": TOOLS} if has_tools else {})}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = ScratchConfigGroup(dataset=str(tmp_path / "rows.jsonl"), vocab_size=300, output=str(tmp_path / "model"))
    run_scratch(ScratchConfig(new=new, architecture=SMALL))
    text = AutoTokenizer.from_pretrained(tmp_path / "model").apply_chat_template(chat, tools=TOOLS, tokenize=False)
    assert ("weather(city, day)" in text) == has_tools
