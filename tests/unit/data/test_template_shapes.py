"""Rare forms of chat templates: which characters are trained, or why a conversation is rejected."""

import json
from dataclasses import replace

import pytest
from chat_tokenizers import CHATML, make_tokenizer

from rlhf_cli.config.data import DataConfig, PromptConfig
from rlhf_cli.data.formats.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.errors import UsageError

TOOL = {"type": "function", "function": {"name": "weather", "description": "look up", "parameters": {}}}
ASK, ANSWER = Message("user", "What?"), Message("assistant", "Paris.")
CALL = Message("assistant", "", (ToolCall("weather", {"city": "Rome"}, "abcdefghi"),))
CALLED = (ASK, CALL, Message("tool", "sunny", tool_call_id="abcdefghi", name="weather"), ANSWER)
SPECIALS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|result|>", "<think>", "</think>", "<bos-x>", "<eos-x>")


def template_of(text):
    return ChatTemplate(make_tokenizer(text, specials=SPECIALS, bos="<bos-x>", eos="<eos-x>"))


def trained(text, *messages, tools=()):
    found = template_of(text).example(Conversation(tuple(messages), tools))
    return [found.text[slice(*span)] for span in found.spans]


CHANNELS = """{{- 'tools: ' + tools | tojson if tools else '' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        GENERATION
        {%- if 'thinking' in m %}{{- '<|start|>assistant analysis: ' + m.thinking + '<|end|>' }}{%- endif %}
        {%- if m.tool_calls %}
            {%- set call = m.tool_calls[0].function %}
            {{- '<|start|>assistant to=' + call.name + ': ' + call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant final: ' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
        {%- endif %}
        ENDGENERATION
    {%- else %}{{- '<|start|>' + m.role + ': ' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""Like gpt-oss's: a thought has a separate channel, which ends like a turn before the header is repeated."""
UNMARKED = CHANNELS.replace("ENDGENERATION", "").replace("GENERATION", "")
MARKED = CHANNELS.replace("ENDGENERATION", "{%- endgeneration %}").replace("GENERATION", "{%- generation %}")
THOUGHT = " analysis: Let me see.<|end|><|start|>assistant"


@pytest.mark.parametrize("text", [UNMARKED, MARKED], ids=["compared", "marked"])
def test_thought_in_a_channel_of_its_own_is_trained_with_the_header_between_it_and_the_answer(text):
    thinks = replace(ANSWER, reasoning="Let me see.")
    assert trained(text, ASK, thinks) == [THOUGHT + " final: Paris.<|return|>"]
    assert trained(text, ASK, ANSWER, ASK, thinks) == [" final: Paris.<|end|>", THOUGHT + " final: Paris.<|return|>"]
    called = trained(text, ASK, replace(CALL, reasoning="Let me see."), tools=(TOOL,))
    assert called == [THOUGHT + ' to=weather: {"city": "Rome"}<|call|>']


PARTS = """{%- for m in messages %}{{- '<|start|>' + m['role'] + ': ' }}
{%- for part in m['content'] %}{%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}{%- endfor %}
{{- '<|end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant:' }}{%- endif %}"""
"""Like templates of vision models: string contents are skipped without an error."""
FIRST_PART = """{%- for m in messages %}{{- '<|start|>' + m['role'] + ': ' + m['content'][0]['text'] + '<|end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant:' }}{%- endif %}"""


@pytest.mark.parametrize("text", [PARTS, FIRST_PART], ids=["all parts", "first part"])
def test_template_that_reads_parts_alone_gets_the_words_as_parts(text):
    system = Message("system", "Be brief.")
    assert trained(text, system, ASK, ANSWER, ASK, ANSWER) == [" Paris.<|end|>"] * 2
    prompt = template_of(text).prompt(Conversation((system, ASK)))
    assert prompt == "<|start|>system: Be brief.<|end|>\n<|start|>user: What?<|end|>\n<|start|>assistant:"
    with pytest.raises(TemplateFault, match="has no place for calls of functions"):
        template_of(text).example(Conversation(CALLED, (TOOL,)))


NO_CALLS = {
    "raises by role": CHATML.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}",
    ),
    "strips what is None": CHATML.replace("message['content']", "message['content'].strip()").replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('Invalid type') }}{% endif %}",
    ),
    "lists tools and drops the call": "{{ tools | tojson if tools else '' }}"
    + CHATML.replace("message['content']", "(message['content'] or '')"),
}


@pytest.mark.parametrize("kind", NO_CALLS)
def test_template_without_a_place_for_calls_is_named_as_the_reason_with_the_row(kind, tmp_path):
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    call = {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}]}
    ask, answer = (
        {"role": "user", "content": "What?"},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
    )
    tokenizer = make_tokenizer(NO_CALLS[kind])
    path = tmp_path / "rows.jsonl"
    said = {"role": "assistant", "content": "Paris."}
    rows = [{"messages": [ask, said]}, {"messages": [ask, call, answer, said], "tools": [TOOL]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reason = "line 2: the chat template has no place for calls of functions"
    with pytest.raises(UsageError, match=reason):
        SEQUENCES.load(DataConfig(dataset=str(path)), tokenizer, dataset=str(path), split="train", seed=0)
    path.write_text(json.dumps({"prompt": [ask, call, answer]}) + "\n")
    with pytest.raises(UsageError, match="line 1: the chat template has no place for calls of functions"):
        load_prompts(PromptConfig(prompt_data=str(path)), tokenizer, max_new_tokens=9, seed=0)


ONE_TURN = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if loop.previtem.role != 'tool' or m.content %}{{- '<|start|>model ' }}{%- endif %}
        {%- if m.tool_calls %}{%- generation %}
            {{- m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | tojson }}{%- endgeneration %}
            {{- '<|result|>' + loop.nextitem.content if loop.nextitem else '<|result|>' }}
        {%- endif %}
        {%- generation %}{{- m.content or '' }}{%- endgeneration %}
        {%- if not m.tool_calls %}{%- generation %}{{- '<|end|>' }}{%- endgeneration %}{%- endif %}
    {%- elif m.role == 'user' %}{{- (tools | tojson if tools else '') + '<|start|>user ' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|start|>model ' }}{%- endif %}"""
"""Like Gemma 4's: a call, the tool's answer and the final text are one turn, with blocks for empty text."""


def test_header_between_a_tools_answer_and_the_words_is_not_trained_for_an_empty_block_before_it():
    assert trained(ONE_TURN, *CALLED, tools=(TOOL,)) == ['weather{"city": "Rome"}', "Paris.<|end|>"]


OPENED = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- '<|start|>assistant: ' + m.content + '<|end|>' }}{%- endgeneration %}
    {%- else %}{{- '<|start|>' + m.role + ': ' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant: <think>\\n' }}{%- endif %}"""
"""Like TRL's for DeepSeek R1: blocks include the header, and the generation prompt opens a thought."""


@pytest.mark.parametrize("text", [OPENED, OPENED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")])
def test_the_header_and_the_opening_of_a_thought_are_given_by_the_generation_prompt(text):
    assert [turn.lstrip() for turn in trained(text, ASK, ANSWER)] == ["Paris.<|end|>"]
    thinks = replace(ANSWER, content="<think>\nLet me see.\n</think>\n\nParis.")
    assert trained(text, ASK, thinks) == ["Let me see.\n</think>\n\nParis.<|end|>"]


STRICT = """{{- tools | tojson if tools else '' }}{%- for m in messages %}{{- '<|start|>' + m.role + ': ' }}
{%- if m.content is none %}
    {{- m.tool_calls[0].function.name + ': ' + m.tool_calls[0].function.arguments + '<|call|>' }}
{%- else %}{{- m.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant: ' }}{%- endif %}"""
"""Like DeepSeek's: calls are rendered only if the content is none and the arguments are strings."""


def test_of_all_forms_of_a_call_one_that_the_template_shows_is_taken():
    assert trained(STRICT, *CALLED, tools=(TOOL,)) == ['weather: {"city": "Rome"}<|call|>', "Paris.<|end|>"]


NEXT_HEADER = """{%- for m in messages %}{{- '<|start|>' + m.role + ': ' + m.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant: ' }}{%- endif %}"""
"""Like GLM's: the header of the next message ends a turn, so the last turn has no end."""


def test_template_that_ends_turns_with_the_next_header_is_refused_with_the_cure():
    with pytest.raises(
        TemplateFault, match=r"no end of turn after the assistant's last text.*--tokenizer_chat_template"
    ):
        trained(NEXT_HEADER, ASK, ANSWER)
