"""Turns that were not sampled end with the end token of the model's template, in every tool call notation."""

import pytest
from model_templates import FAMILIES
from tool_templates import TOOL_FAMILIES

from rlhf_cli.data.formats.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.dialogue import ChatDialogue
from rlhf_cli.data.templates.turn_bridge import tool_results

ALL = {**FAMILIES, **TOOL_FAMILIES}
CALLING = sorted(name for name, family in ALL.items() if family.calls)
ENDS = {
    "GLM": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gpt-oss": ("<|return|>", "<|call|>"),
    "Gemma 4": ("<turn|>", "<|tool_response>"),
}
"""End-of-turn tokens of model families with more than one."""
PROPERTIES = {
    "city": {"type": "string"},
    "day": {"type": "integer"},
    "unit": {"type": "string", "enum": ["K", "F"]},
    "note": {"type": "string"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city", "day", "unit"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "look up", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}},
]


def dialogue_of(name, tools=()):
    tokenizer = ALL[name].tokenizer()
    ends = tokenizer.convert_tokens_to_ids(list(ENDS.get(name, (ALL[name].end,))))
    return ChatDialogue(ChatTemplate(tokenizer), tokenizer, tools, end_ids=ends, vocab_size=len(tokenizer)), tokenizer


@pytest.mark.parametrize("name", CALLING)
def test_made_up_calls_are_read_as_they_are_written(name):
    dialogue, tokenizer = dialogue_of(name, TOOLS)
    turns = [dialogue.written(text) for text in dialogue.example_calls()]
    expected = [ToolCall("weather", {"city": "1", "day": 1, "unit": "K"}), ToolCall("now", {})]
    assert [dialogue.read(turn).calls for turn in turns] == [(call,) for call in expected]
    end = {"GLM": "<|observation|>", "gpt-oss": "<|call|>", "Gemma 4": "<|tool_response>"}.get(name, ALL[name].end)
    assert [tokenizer.convert_ids_to_tokens(turn[-1]) for turn in turns] == [end, end]


@pytest.mark.parametrize("name", ["DeepSeek R1", "DeepSeek V3", "Qwen 3"])
def test_a_turn_is_in_a_thought_only_if_the_text_before_it_begins_one(name):
    """DeepSeek R1's template opens a thought in the first turn, but not after tool results."""
    dialogue, tokenizer = dialogue_of(name, TOOLS)
    call = ToolCall("now", {})
    written = [
        token for token in dialogue.written(dialogue.example_calls()[1]) if tokenizer.decode([token]) != "</think>"
    ]
    prompt = ChatTemplate(tokenizer).prompt(Conversation((Message("user", "When?"),), tuple(TOOLS)))
    first = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    asked = Conversation((Message("user", "When?"), Message("assistant", "", (call,))))
    later = dialogue.between(asked, tool_results([("now", "noon")], first=0), last_id=written[-1])
    assert dialogue.read(written, behind=first).calls == (() if name == "DeepSeek R1" else (call,))
    assert dialogue.read(written, behind=[*first, *written, *later]).calls == (call,)


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_written_turn_ends_once_and_as_the_template_ends_it(name):
    dialogue, tokenizer = dialogue_of(name)
    end = {"GLM": "<|user|>"}.get(name, ALL[name].end)
    ids = dialogue.written("It is.")
    assert tokenizer.decode(ids) == f"It is.{end}"
    assert dialogue.written(f"It is.{end}") == dialogue.written(f"It is.{end}more") == ids
