"""Tool calls in sampled turns are parsed in the notation of the chat template."""

import json

import pytest
from chat_tokenizers import make_tokenizer
from model_templates import FAMILIES, QWEN_SPECIALS
from tool_templates import TOOL_FAMILIES, UNREADABLE

from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.tool_calls import ParsedTurn, begins_thought, call_format_of
from rlhf_cli.errors import UsageError

ALL = {**FAMILIES, **TOOL_FAMILIES}
CALLING = sorted(name for name, family in ALL.items() if family.calls)
PARIS: dict[str, object] = {
    "city": "Paris",
    "days": [1, 2.5],
    "exact": True,
    "of": None,
    "näh": {"a b": 'it\'s "x" </think>\n\n{'},
}
CODE: dict[str, object] = {"program": "print('a')\n\nfor x in [1]:\n    print({x})\n"}
TYPES = {"city": "string", "days": "array", "exact": "boolean", "of": "null", "näh": "object", "program": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}},
        },
    }
    for name in ("weather", "time")
]


def format_of(name, template=None):
    tokenizer = ALL[name].tokenizer() if template is None else make_tokenizer(template, specials=QWEN_SPECIALS)
    return call_format_of(ChatTemplate(tokenizer), tokenizer, TOOLS)


def written(name, *calls):
    """Return the text of calls in a family's notation, as defined in the test helpers."""
    listed = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": called, "arguments": arguments}}
        for number, (called, arguments) in enumerate(calls)
    ]
    write = ALL[name].calls
    assert write is not None
    return write(listed)


@pytest.mark.parametrize("name", CALLING)
def test_call_in_the_template_s_notation_is_read_back(name):
    found = format_of(name)
    for arguments in (PARIS, CODE, dict[str, object]()):
        parsed = found.parse(("\n</think>\n" if found.opens_thought else "") + written(name, ("weather", arguments)))
        assert (parsed.calls, parsed.faults) == ((ToolCall("weather", arguments),), ())


@pytest.mark.parametrize("name", [name for name in CALLING if ALL[name].parallel])
def test_calls_of_one_turn_are_read_in_order(name):
    found = format_of(name)
    text = written(name, ("weather", PARIS), ("time", {}), ("time", CODE))
    parsed = found.parse(("</think>" if found.opens_thought else "") + text)
    expected = (ToolCall("weather", PARIS), ToolCall("time", {}), ToolCall("time", CODE))
    assert (parsed.calls, parsed.faults) == (expected, ())


@pytest.mark.parametrize("name", [name for name in CALLING if name != "Llama 3"])
def test_text_before_a_call_is_the_content(name):
    found = format_of(name)
    begun = "I see.</think>" if found.opens_thought else ""
    parsed = found.parse(begun + "I'll look.\n" + written(name, ("weather", PARIS)) + "\n")
    assert (parsed.content, parsed.calls) == (begun + "I'll look.", (ToolCall("weather", PARIS),))


@pytest.mark.parametrize("name", CALLING)
def test_turn_without_a_call_is_content_alone(name):
    text = 'The answer is {"weather": 1}; see <b>functions</b>, not [x].'
    assert format_of(name).parse(text) == ParsedTurn(text, (), ())


@pytest.mark.parametrize("name", ["Qwen 2.5", "Qwen 3", "Phi 4", "Qwen with tags", "GLM", "DeepSeek V3", "Mistral 11"])
def test_call_in_a_thought_is_no_call(name):
    thought = "<think>\nPerhaps " + written(name, ("time", {})) + "?\n</think>\n"
    found = format_of(name)
    parsed = found.parse(thought + written(name, ("weather", PARIS)))
    assert (parsed.content, parsed.calls, parsed.faults) == (thought.strip(), (ToolCall("weather", PARIS),), ())
    assert found.parse(thought.replace("</think>", "")).calls == ()


def test_marks_of_mistrals_thoughts_are_known():
    call, found = written("Mistral 11", ("weather", PARIS)), format_of("Mistral 11")
    parsed = found.parse(f"[THINK]Perhaps {call}?[/THINK]{call}")
    assert (parsed.calls, parsed.faults) == ((ToolCall("weather", PARIS),), ())
    assert found.parse(f"[THINK]Perhaps {call}?").calls == ()
    assert found.parse(f"Perhaps[/THINK]{call}", opens_thought=True).calls == (ToolCall("weather", PARIS),)
    assert [begins_thought(text) for text in ("x[THINK]", "<think>\n", "<think></think>", "")] == [
        True,
        True,
        False,
        False,
    ]


def test_thought_that_the_prompt_opens_holds_no_call():
    found = format_of("DeepSeek R1")
    call = written("DeepSeek R1", ("weather", PARIS))
    assert found.opens_thought
    assert found.parse("I could " + call).calls == ()
    assert found.parse("I could " + call + "</think>" + call).calls == (ToolCall("weather", PARIS),)


FAULTS = {
    '{"name": "weather", "arguments": {"city": }}</tool_call>': "has broken JSON: Expecting value at its character 43",
    '{"name": "weather", "arguments": {"city": NaN}}</tool_call>': "has broken JSON: NaN is no number in JSON",
    '{"arguments": {}}\n</tool_call>': 'has no "name" that is a text',
    '{"name": "weather"}\n</tool_call>': 'of weather has no "arguments"',
    '{"name": "weather", "arguments": [1]}\n</tool_call>': "of weather has arguments that are no JSON object",
    "[1]\n</tool_call>": "is no JSON object with a name and arguments",
    '{"name": "weather", "arguments": {}}': "of weather does not end with </tool_call>",
    '{"name": "weather", "arguments": {"city": "\\ud800"}}\n</tool_call>': "has half a character in its text, or is "
    "nested too deeply",
    '{"a":' * 100_000: "has broken JSON: it is nested too deeply",
}


@pytest.mark.parametrize("text", FAULTS, ids=range(len(FAULTS)))
def test_malformed_call_is_a_fault_and_stays_in_the_content(text):
    turn = "<tool_call>\n" + text
    assert format_of("Qwen 2.5").parse(turn) == ParsedTurn(turn, (), (f"The call {FAULTS[text]}, so it was not made.",))


def test_calls_around_a_malformed_one_are_read():
    good = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    parsed = format_of("Qwen 2.5").parse(f"{good}\n<tool_call>\nnothing\n</tool_call>\n{good}")
    assert parsed.calls == (ToolCall("time", {}),) * 2
    assert parsed.faults == ("The call has broken JSON: Expecting value at its character 1, so it was not made.",)


def test_equal_faults_are_named_once():
    assert len(format_of("Qwen 2.5").parse("<tool_call> " * 1000).faults) == 1


def test_arguments_as_json_text_are_read():
    text = json.dumps({"name": "weather", "arguments": json.dumps(PARIS)})
    assert format_of("Qwen 2.5").parse(f"<tool_call>{text}</tool_call>").calls == (ToolCall("weather", PARIS),)


def test_llama_s_call_is_the_whole_turn_perhaps_behind_a_token():
    found = format_of("Llama 3")
    call = written("Llama 3", ("weather", PARIS))
    assert found.parse("<|begin_of_text|>" + call).calls == (ToolCall("weather", PARIS),)
    assert found.parse("I could write " + call).calls == ()
    assert found.parse('{"answer": 46}') == ParsedTurn('{"answer": 46}', (), ())
    assert found.parse('{"name": "weather", "parameters": {').faults


def test_gpt_oss_may_name_the_tool_in_another_place_of_the_header():
    found = format_of("gpt-oss")
    arguments = json.dumps(PARIS, ensure_ascii=False)
    thought = "<|channel|>analysis<|message|>I may send to=functions.time soon.<|end|><|start|>assistant"
    header = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    parsed = found.parse(thought + header + arguments)
    assert (parsed.calls, parsed.faults, found.end) == ((ToolCall("weather", PARIS),), (), "<|call|>")
    final = thought + '<|channel|>final<|message|>{"a": 1}'
    assert found.parse(final).calls == ()


def test_types_of_arguments_come_from_the_tools():
    def read(city, days):
        tags = f"<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>"
        text = f"<tool_call>\n<function=weather>\n{tags}\n</function>\n</tool_call>"
        return format_of("Qwen with tags").parse(text).calls[0].arguments

    assert read("12", "[1]") == {"city": "12", "days": [1]}
    assert read('"12"', "twelve") == {"city": '"12"', "days": "twelve"}
    assert read("\n a\n", "") == {"city": "\n a\n", "days": ""}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<function=>\n</function>", "has no name"),
        ("<function=weather>\n<parameter=city>\nRome", "of weather has an argument without </parameter> behind it"),
        ("<function=weather>\n<parameter=city", "of weather has an argument without > behind it"),
    ],
)
def test_fault_in_tags_is_named(text, fault):
    assert format_of("Qwen with tags").parse("<tool_call>\n" + text).faults == (
        f"The call {fault}, so it was not made.",
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("weather(city='Rome'", "has arguments that cannot be read: , was expected before '<|tool_call_end|>'"),
        ("weather(city='Rome', city='Bonn')]", "has arguments that cannot be read: city is there twice"),
        (
            "weather(city=Rome)]",
            "has arguments that cannot be read: 'Rome' is neither a number nor in quotes",
        ),
        ("weather(city=" + "[" * 100_000, "has arguments that are nested too deeply"),
        ("weather(city='\\x')]", "has arguments that cannot be read: the text \"'\\\\x'\" has a broken escape"),
        ("weather(days=1 2)]", "has arguments that cannot be read: '1 2' is neither a number nor in quotes"),
    ],
)
def test_fault_in_pairs_is_named(text, fault):
    parsed = format_of("LFM 2").parse("<|tool_call_start|>[" + text + "<|tool_call_end|>")
    assert parsed.faults == (f"The call of weather {fault}, so it was not made.",)


@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3", "Phi 3"])
def test_template_without_calls_is_refused(name):
    with pytest.raises(UsageError, match=r"has no place for tools and calls.*--tokenizer_chat_template FILE"):
        format_of(name)


def test_notation_that_cannot_be_read_back_is_refused():
    with pytest.raises(UsageError, match=r"a notation that cannot be read back, 'probe_7f3a := first_7f3a copper"):
        format_of("", UNREADABLE)
