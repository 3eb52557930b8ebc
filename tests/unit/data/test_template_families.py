"""Each template family with each kind of conversation: the assistant's text and end of turn are trained."""

import json
import random

import pytest
from chat_tokenizers import make_metaspace_tokenizer, make_tokenizer
from model_templates import FAMILIES, QWEN_SPECIALS
from template_settings import split_settings

from rlhf_cli.config.data import DataConfig, PromptConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.errors import UsageError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "find out",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]


def user(content):
    return {"role": "user", "content": content}


def says(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


def calls(*names, content=None, **arguments):
    listed = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed}


def result(content, number=0):
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05}", "name": "weather"}


SUNNY = 'sunny, "mild" é'
PARIS = {"city": "Paris", "days": [1, 2.5], "exact": True, "of": None, "näh": {"a b": 'it\'s "x"'}}
THOUGHT = "<think>\nwell, é\n\nso\n</think>\n\n"
PLAIN = {
    "single": [user("What?"), says("Paris.")],
    "multi-turn": [
        user("What?"),
        says("Paris."),
        user("And then?"),
        says("Rome. Paris."),
        user("And?"),
        says("Paris."),
    ],
    "unicode": [user("¿Qué? 漢字"), says("👩‍🚀 漢字 — é\n\n\tcode {}"), user("👩‍🚀"), says("ﷺ")],
    "same words": [user("Paris."), says("Paris."), user("Paris."), says("Paris.")],
    "markup": [user("assistant\n"), says("user: [x] <b>{{ x }}</b> </s >"), user("model"), says("assistant")],
    "trailing space": [user("What? "), says("Paris. \n"), user("\n"), says("Rome\n\n")],
    "lines": [user("What?"), says("- a\n  - b\n\n\n```\nx = 1\n```"), user("?"), says("1\n2\n\n3")],
}
WITH_SYSTEM = {
    "system": [system("Be brief."), *PLAIN["multi-turn"]],
    "empty system": [system(""), *PLAIN["multi-turn"]],
    "system that is said later": [system("Paris."), *PLAIN["same words"]],
}
WITH_CALLS = {
    "call": [user("Weather?"), calls("weather", **PARIS), result(SUNNY), says("It is sunny.")],
    "call without arguments": [user("Weather?"), calls("weather"), result(SUNNY), says("It is sunny.")],
    "call at the end": [user("Weather?"), calls("weather", **PARIS)],
    "calls in several turns": [
        *(user("Weather?"), calls("weather", **PARIS), result(SUNNY), says("It is sunny.")),
        *(user("And the time?"), calls("time", city="Rome"), result("12:30"), says("Half past twelve.")),
    ],
    "words before a call": [user("Hello"), says("Hello!"), *[user("Weather?"), calls("weather", **PARIS)]],
}
PARALLEL = {
    "parallel calls": [
        *(user("Both?"), calls("weather", "time", "time", **PARIS)),
        *(result(SUNNY), result("12:30", 1), result("12:30", 2), says("Sunny at half past twelve.")),
    ],
}
TEXT_AND_CALL = {
    "text and call": [
        *(user("Weather?"), calls("weather", content="I'll look.", **PARIS), result(SUNNY), says("Sunny.")),
    ],
}
THINKING = {
    "thought": [user("What?"), says(THOUGHT + "Paris.")],
    "thought in the last turn": [user("What?"), says("Paris."), user("And?"), says(THOUGHT + "Paris.")],
}


def conversations(family):
    """Return the conversations that a family supports."""
    fitting = dict(PLAIN)
    fitting |= WITH_SYSTEM if family.system else {}
    fitting |= WITH_CALLS if family.calls else {}
    fitting |= PARALLEL if family.calls and family.parallel else {}
    fitting |= TEXT_AND_CALL if family.calls and family.text_and_calls else {}
    return fitting | (THINKING if family.thinks else {})


def load(tmp_path, tokenizer, *rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_data, template = split_settings(settings)
    config = DataConfig(dataset=str(path), **of_data)
    return SEQUENCES.load(config, tokenizer, dataset=config.dataset, split="train", seed=0, template=template)


def row_of(messages):
    called = any("tool_calls" in message for message in messages)
    return {"messages": messages, "tools": TOOLS if called else None}


def trained_turns(tokenizer, sequence):
    """Return the text of each run of trained tokens."""
    ids, mask = sequence.token_ids, sequence.loss_mask
    starts = [i for i in range(len(ids)) if mask[i] and not mask[i - 1]]
    stops = [i + 1 for i in range(len(ids)) if mask[i] and not (i + 1 < len(ids) and mask[i + 1])]
    return [tokenizer.decode(ids[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def expected_turns(family, messages):
    turns = []
    for message in messages:
        if message["role"] == "assistant":
            said = family.says(message["content"]) if message["content"] else ""
            if family.empty_thought and message is messages[-1] and "</think>" not in said:
                said = family.empty_thought + said
            called = family.calls(message["tool_calls"]) if "tool_calls" in message else ""
            between = "\n" if message["content"] and called.startswith("<tool_call>") else ""
            turns.append(said + between + called + family.end)
    return turns


CASES = [(name, kind) for name, family in FAMILIES.items() for kind in conversations(family)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_trained_tokens_are_the_assistants_text_and_end_of_turn(name, kind, tmp_path):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(family.end)
    messages = conversations(family)[kind]
    data = load(tmp_path, tokenizer, row_of(messages))
    assert trained_turns(tokenizer, data.items[0]) == expected_turns(family, messages)
    assert data.report.merged_starts == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_what_transformers_renders(name):
    tokenizer = FAMILIES[name].tokenizer()
    template = ChatTemplate(tokenizer)
    for messages in PLAIN.values():
        conversation = Conversation(tuple(Message(message["role"], message["content"]) for message in messages))
        assert template.example(conversation).text == tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = Conversation(conversation.messages[:-1])
        rendered = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert template.prompt(prompt) == rendered


@pytest.mark.parametrize("name", ["Mistral 7B", "Mistral Small", "Gemma 3"])
def test_tokenizers_whose_words_begin_with_a_space_train_the_same_texts(name, tmp_path):
    family = FAMILIES[name]
    tokenizer = make_metaspace_tokenizer(family.template, specials=family.specials, bos=family.bos, eos=family.end)
    for messages in conversations(family).values():
        (sequence,) = load(tmp_path, tokenizer, row_of(messages)).items
        trained = [turn.replace("[TOOL_CALLS]  [", "[TOOL_CALLS] [") for turn in trained_turns(tokenizer, sequence)]
        assert trained == expected_turns(family, messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_words_come_back_from_the_trained_tokens(name, tmp_path):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(trim_offsets=True)
    chance = random.Random(name)
    words = [
        "Paris",
        "12",
        "é",
        "👩‍🚀",
        "漢字",
        "\n",
        "\n\n",
        "  ",
        "(",
        "</s",
        "user",
        "assistant",
        "model",
        "[INST",
        "{",
        "'",
    ]
    rows = []
    for _ in range(30):
        texts = [
            "x" + " ".join(chance.choices(words, k=chance.randint(1, 12))) + "x"
            for _ in range(2 * chance.randint(1, 3))
        ]
        rows.append([(user, says)[i % 2](text) for i, text in enumerate(texts)])
    data = load(tmp_path, tokenizer, *(row_of(messages) for messages in rows))
    for messages, sequence in zip(rows, data.items, strict=True):
        assert trained_turns(tokenizer, sequence) == expected_turns(family, messages)


STEPS = {  # thoughts of the steps after the last question, which Qwen 3 keeps
    "thought before a call": [
        *(user("Weather?"), calls("weather", content=THOUGHT, **PARIS), result(SUNNY), says(THOUGHT + "Sunny.")),
    ],
    "empty thought before a call": [user("Hello"), says("Hello!"), user("Weather?"), calls("weather", **PARIS)],
}


@pytest.mark.parametrize("kind", STEPS)
def test_thoughts_between_calls_are_trained_where_the_template_keeps_them(kind, tmp_path):
    family = FAMILIES["Qwen 3"]
    tokenizer = family.tokenizer()
    data = load(tmp_path, tokenizer, row_of(STEPS[kind]))
    trained = [turn.replace("</think>\n\n\n", "</think>\n\n") for turn in trained_turns(tokenizer, data.items[0])]
    assert trained == [turn.replace("\n\n\n", "\n\n") for turn in expected_turns(family, STEPS[kind])]
    assert data.report.unthought_turns == 0


OPENS_THOUGHTS = """{%- set asked = namespace(last=-1) %}
{%- if tools %}{{- tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages if message.role == 'user' %}{%- set asked.last = message.content %}{%- endfor %}
{%- set thinks = namespace(now=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' and message.content == asked.last %}{%- set thinks.now = true %}{%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'assistant' and thinks.now %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
"""Like Qwen 3.5's: the generation prompt opens a thought, which is removed from turns before the last question."""


def test_an_answer_after_a_tool_and_before_a_further_question_is_trained(tmp_path):
    tokenizer = make_tokenizer(OPENS_THOUGHTS, specials=(*QWEN_SPECIALS, "<think>", "</think>"), eos="<|im_end|>")
    called = [user("Weather?"), calls("weather", city="Paris"), result("sunny"), says("It is sunny.")]
    row = row_of([*called, user("Thanks"), says("Welcome.")])
    turns = trained_turns(tokenizer, load(tmp_path, tokenizer, row).items[0])
    assert turns[0].startswith("<tool_call>")
    assert turns[1] == "It is sunny.<|im_end|>"
    assert turns[2].lstrip() == "</think>\n\nWelcome.<|im_end|>"  # one token contains both preceding newlines


def test_white_space_around_thoughts_is_the_templates(tmp_path):
    tokenizer = FAMILIES["Qwen 3"].tokenizer()
    row = row_of([user("What?"), says("<think>well</think>Paris.")])
    (sequence,) = load(tmp_path, tokenizer, row).items
    assert trained_turns(tokenizer, sequence) == ["<think>\nwell\n</think>\n\nParis.<|im_end|>"]


@pytest.mark.parametrize("name", ["Qwen 3", "DeepSeek R1"])
def test_thoughts_of_earlier_turns_that_the_template_drops_are_counted(name, tmp_path):
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    turns = [user("What?"), says("<think>Rome</think>Paris."), user("And?"), says("<think>no</think>Rome."), user("?")]
    last = says(THOUGHT + "Paris." if family.thinks else "Paris.")
    data = load(tmp_path, tokenizer, row_of([*turns, last]), row_of(PLAIN["single"]))
    expected = ["Paris." + family.end, "Rome." + family.end, last["content"] + family.end]
    assert trained_turns(tokenizer, data.items[0]) == expected
    assert data.report.unthought_turns == 2
    assert "2 earlier turns without the thought they had, which the chat template drops" in data.report.summary


def thinks(thought, content, **more):
    return says(content) | {"reasoning_content": thought} | more


REASONED = {
    "thought": [user("What?"), thinks("well, é\n\nso\n", "Paris.")],
    "thoughts of every turn": [
        *(
            user("What?"),
            thinks("Rome", "Paris."),
            user("And?"),
            says("Rome."),
            user("?"),
            thinks("Paris.", "Paris."),
        ),
    ],
    "thoughts between calls": [
        *(user("Weather?"), calls("weather", **PARIS) | {"reasoning_content": "so"}, result(SUNNY)),
        thinks("think", "think"),
    ],
}


def in_text(message):
    thought = message.get("reasoning_content", "").strip()
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return rest | ({"content": f"<think>\n{thought}\n</think>\n\n{message['content'] or ''}"} if thought else {})


@pytest.mark.parametrize("kind", REASONED)
@pytest.mark.parametrize("name", ["Qwen 2.5", "Qwen 3"])
def test_reasoning_content_is_trained_as_the_same_thought_in_the_text(name, kind, tmp_path):
    """Qwen 3's template uses it; Qwen 2.5's has no thoughts."""
    tokenizer, messages = FAMILIES[name].tokenizer(), REASONED[kind]
    apart = load(tmp_path, tokenizer, row_of(messages))
    together = load(tmp_path, tokenizer, row_of([in_text(message) for message in messages]))
    assert trained_turns(tokenizer, apart.items[0]) == trained_turns(tokenizer, together.items[0])
    assert apart.items[0].token_ids.tolist() == together.items[0].token_ids.tolist()
    num_thoughts = sum("reasoning_content" in message for message in messages)
    assert apart.report.inlined_thoughts == (0 if name == "Qwen 3" else num_thoughts)
    assert together.report.inlined_thoughts == 0
    assert apart.report.unthought_turns == together.report.unthought_turns


def test_reasoning_in_a_template_with_marks_of_its_own_is_trained_with_them(tmp_path):
    tokenizer = altered("'<think>\\n' + thought.strip('\\n') + '\\n</think>", "'[T]' + thought + '[/T]", "Qwen 3")
    (sequence,) = load(tmp_path, tokenizer, row_of(REASONED["thought"])).items
    assert trained_turns(tokenizer, sequence) == ["[T]well, é\n\nso\n[/T]\n\nParis.<|im_end|>"]


def test_reasoning_is_part_of_plain_text_and_said(tmp_path):
    tokenizer = FAMILIES["Qwen 3"].tokenizer()
    data = load(tmp_path, tokenizer, row_of(REASONED["thought"]), apply_chat_template=False)
    assert tokenizer.decode(data.items[0].token_ids).endswith("so\n</think>\n\nParis.<|im_end|>")
    assert "1 turns whose reasoning_content became <think> text" in data.report.summary


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (user("What?") | {"reasoning_content": "well"}, "message 1 from user has reasoning_content"),
        (user("What?"), r"message 2 has reasoning_content that is not text: \['well'\]"),
    ],
)
def test_reasoning_content_that_is_no_thought_of_the_assistant_is_refused(message, reason, tmp_path):
    with pytest.raises(UsageError, match=f"line 1: {reason}"):
        load(tmp_path, FAMILIES["Qwen 3"].tokenizer(), row_of([message, thinks(["well"], "Paris.")]))


@pytest.mark.parametrize("name", FAMILIES)
def test_end_of_turn_is_a_target_of_a_pack_even_where_it_is_padding_too(name, tmp_path):
    tokenizer = FAMILIES[name].tokenizer()
    data = load(tmp_path, tokenizer, row_of(PLAIN["multi-turn"]))
    targets = pack([data.items[0]]).targets_K.tolist()
    assert targets.count(tokenizer.pad_token_id) == 3
    assert tokenizer.decode(targets[-1:]) == FAMILIES[name].end


REFUSED = {
    "system role": ("Gemma 2", WITH_SYSTEM["system"], "System role not supported"),
    "system left out": (
        "Mistral 7B",
        WITH_SYSTEM["system"],
        "leaves out or alters the text of the system: 'Be brief.'",
    ),
    "tools": ("Gemma 3", [*PLAIN["single"], calls("weather")][:2], "leaves out the tools of the row"),
    "call in a template for text": ("Gemma 3", WITH_CALLS["call at the end"], "has no place for calls of functions"),
    "tool's role": ("Gemma 3", [*PLAIN["single"], result(SUNNY), says("x")], "roles must alternate"),
    "tool left out": ("Phi 3", [*PLAIN["single"], result(SUNNY), says("x")], "alters the text of the tool: 'sunny"),
    "call left out": ("Phi 3", WITH_CALLS["call"], "has no place for calls of functions"),
    "two calls": ("Llama 3", PARALLEL["parallel calls"], "only supports single tool-calls"),
    "text beside a call": ("Llama 3", TEXT_AND_CALL["text and call"], "the assistant's text: \"I'll look"),
    "text beside Mistral's call": ("Mistral Small", TEXT_AND_CALL["text and call"], "the assistant's text: \"I'll"),
    "id of a call": (
        "Mistral 7B",
        [user("?"), {**calls("time"), "tool_calls": [{"id": "1", "function": {"name": "time"}}]}],
        "IDs should be alphanumeric",
    ),
    "reasoning of the last turn": ("DeepSeek R1", [user("?"), {**says("x"), "reasoning_content": "so"}], "thought of"),
    "thought of the last turn": ("DeepSeek R1", THINKING["thought"], "leaves out the thought of the last turn"),
    "ends with the user": ("Qwen 3", [*PLAIN["single"], user("And?")], "ends with user, expected an assistant turn"),
    "roles out of order": ("Qwen 3", [says("Paris."), user("What?")], "message 1 is from assistant at the start"),
    "two users": ("Qwen 3", [user("a"), user("b"), says("c")], "message 2 is from user after user"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_row_that_the_template_has_no_place_for_is_refused_with_the_reason(case, tmp_path):
    name, messages, reason = REFUSED[case]
    row = row_of(messages) | ({"tools": TOOLS} if case == "tools" else {"tools": None} if name == "Phi 3" else {})
    if case == "call in a template for text":
        row["tools"] = None
    with pytest.raises(UsageError, match=reason) as caught:
        load(tmp_path, FAMILIES[name].tokenizer(), row_of(PLAIN["single"]), row)
    assert "rows.jsonl line 2: " in str(caught.value)


def altered(old, new, name="Qwen 2.5"):
    family = FAMILIES[name]
    assert old in family.template
    tokenizer = family.tokenizer()
    tokenizer.chat_template = family.template.replace(old, new)
    return tokenizer


FORGETFUL = {
    "drops the second call": (
        ("message.tool_calls %}", "message.tool_calls[:1] %}"),
        PARALLEL["parallel calls"],
        "the assistant's call of time",
    ),
    "drops arguments": (
        ("call.function.arguments | tojson", "'{}'"),
        WITH_CALLS["call"],
        "the assistant's call of weather",
    ),
    "drops results": (("'\\n<tool_response>\\n' + message.content", "''"), WITH_CALLS["call"], "the text of the tool"),
    "drops what the user says second": (
        ("{%- if message.role == 'user' or", "{%- if (message.role == 'user' and loop.index0 != 2) or"),
        PLAIN["multi-turn"],
        "the text of the user: 'second question'",
    ),
    "ends calls otherwise": (
        ("{%- endfor %}\n        {{- '<|im_end|>\\n' }}", "{%- endfor %}\n        {{- 'END\\n' }}"),
        WITH_CALLS["call at the end"],
        r"does not end with <\|im_end\|> as other turns do",
    ),
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_template_that_drops_a_part_of_the_conversation_is_refused(name, tmp_path):
    change, messages, reason = FORGETFUL[name]
    with pytest.raises(UsageError, match=reason):
        load(tmp_path, altered(*change), row_of(messages))


def test_calls_need_a_chat_template(tmp_path):
    with pytest.raises(UsageError, match="line 1: tools and tool calls need a chat template"):
        load(
            tmp_path,
            FAMILIES["Qwen 3"].tokenizer(),
            row_of([user("What?"), calls("weather")]),
            apply_chat_template=False,
        )


def test_generation_blocks_bound_calls_too(tmp_path):
    opened = "{{- '<|im_start|>assistant' }}\n        {%- generation %}"
    tokenizer = altered("{{- '<|im_start|>assistant' }}", opened)
    tokenizer.chat_template = (
        tokenizer.chat_template.replace(
            "{{- '<|im_end|>\\n' }}\n    {%- elif", "{{- '<|im_end|>\\n' }}{%- endgeneration %}\n    {%- elif"
        )
        .replace("(message.role == 'assistant' and not message.tool_calls)", "false")
        .replace("for call in message.tool_calls %}", "for call in message.tool_calls or [] %}")
    )
    messages = WITH_CALLS["call"]
    (sequence,) = load(tmp_path, tokenizer, row_of(messages)).items
    trained = [turn.removeprefix("\n") for turn in trained_turns(tokenizer, sequence)]
    assert trained == expected_turns(FAMILIES["Qwen 2.5"], messages)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls and name != "DeepSeek R1"])
def test_rollouts_with_tools_start_from_the_tokens_that_training_saw(name, tmp_path):
    tokenizer = FAMILIES[name].tokenizer()
    called = WITH_CALLS["call"]
    (sequence,) = load(tmp_path, tokenizer, row_of(called)).items
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "Weather?", "tools": TOOLS}, {"prompt": called[:3], "tools": json.dumps(TOOLS)}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PromptConfig(prompt_data=str(path), max_len=4096)
    for prompt in load_prompts(config, tokenizer, max_new_tokens=16, seed=0).prompts:
        assert sequence.token_ids[: len(prompt.prompt_ids)].tolist() == prompt.prompt_ids
        assert "find out" in prompt.text


def test_prompt_that_the_template_drops_is_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "Weather?", "tools": TOOLS}) + "\n")
    config = PromptConfig(prompt_data=str(path), max_len=4096)
    with pytest.raises(UsageError, match="line 1: the chat template leaves out the tools of the row"):
        load_prompts(config, FAMILIES["Gemma 3"].tokenizer(), max_new_tokens=16, seed=0)


END = "<|im_end|>"


@pytest.mark.parametrize("place", ["the name of a call", "a description", "a schema", "an argument"])
def test_control_tokens_of_calls_and_tools_are_counted_as_those_of_content(place, tmp_path):
    family = FAMILIES["Qwen 2.5"]
    start = "<|im_start|>"
    name = f"go{start}" if place == "the name of a call" else "weather"
    function = json.loads(json.dumps(TOOLS[0]["function"])) | {"name": name}
    if place == "a description":
        function["description"] = f"find {start}"
    if place == "a schema":
        function["parameters"]["properties"][start] = {"type": "string"}
    city = f"Paris {start}" if place == "an argument" else "Paris"
    messages = [user("What?"), calls(name, city=city), result("sunny"), says("Sunny.")]
    row = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    clean = {"messages": PLAIN["single"]}
    report = load(tmp_path, family.tokenizer(), clean, row).report
    assert (report.control_rows, report.control_tokens) == (1, {start: 1})
    assert report.control_at.endswith("line 2")
    prompt = row | {"messages": messages[:3]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    config = PromptConfig(prompt_data=str(tmp_path / "prompts.jsonl"))
    data = load_prompts(config, family.tokenizer(), max_new_tokens=8, seed=0)
    assert data.report.control_tokens == {start: 1}


@pytest.mark.parametrize("call", [calls("weather", city=f"Paris{END}"), calls(f"weather{END}", city="Paris")])
def test_an_end_of_turn_in_a_call_is_named(call, tmp_path):
    row = {"messages": [user("What?"), call, result("sunny"), says("Sunny.")], "tools": TOOLS}
    with pytest.raises(UsageError, match=r"call of weather.* has the control token '<\|im_end\|>' in its name or arg"):
        load(tmp_path, FAMILIES["Qwen 2.5"].tokenizer(), row)
