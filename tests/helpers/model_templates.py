"""Chat templates like those of released models, including quirks, with expected assistant turns."""

# ruff: noqa: RUF001 - DeepSeek's tokens contain full-width bars

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chat_tokenizers import make_tokenizer
from transformers import PreTrainedTokenizerFast


def as_is(content: str) -> str:
    return content


def spaced_json(name: str, arguments: dict, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {json.dumps(arguments, ensure_ascii=False)}}}'


def joined(opening: str, closing: str, between: str = "") -> Callable[[list[dict]], str]:
    """Return a function that writes calls as JSON objects between two tags."""
    return lambda calls: between.join(
        opening + spaced_json(call["function"]["name"], call["function"]["arguments"]) + closing for call in calls
    )


@dataclass(frozen=True)
class Family:
    """A template with its special tokens; the first one ends a turn.

    `says` writes assistant text, `calls` tool calls (None if unsupported); `thinks`: reasoning in the last turn is
    kept.
    """

    template: str
    specials: tuple[str, ...]
    bos: str | None = None
    system: bool = True
    thinks: bool = True
    parallel: bool = True
    text_and_calls: bool = True
    says: Callable[[str], str] = as_is
    empty_thought: str = ""  # reasoning that the template writes before the last turn
    calls: Callable[[list[dict]], str] | None = None

    @property
    def end(self) -> str:
        return self.specials[0]

    def tokenizer(self, **settings) -> PreTrainedTokenizerFast:
        settings = {"eos": self.end, "bos": self.bos, **settings}
        return make_tokenizer(self.template, specials=self.specials, adds_bos=self.bos is not None, **settings)


# Date, tools in the first user message, one call per turn without text, results as JSON.
LLAMA_3_1 = """{{- bos_token }}
{%- set turns = messages %}{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set turns = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with a call of one of these functions.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- turns[0].content | trim + '<|eot_id|>' }}
    {%- set turns = turns[1:] %}
{%- endif %}
{%- for message in turns %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

QWEN_HEAD = """{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else DEFAULT) }}
    {{- '\\n\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nWrite a call within <tool_call></tool_call> XML tags.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- elif DEFAULT %}
    {{- '<|im_start|>system\\n' + DEFAULT + '<|im_end|>\\n' }}
{%- endif %}
"""
QWEN_TOOL = """
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
QWEN_2_5 = (  # default system prompt; calls as text are quoted twice, so objects are required
    "{%- set DEFAULT = 'You are Qwen, created by Alibaba Cloud.' %}\n"
    + QWEN_HEAD
    + """{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}"""
    + QWEN_TOOL
    + """    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
QWEN_3 = (  # reasoning before the last question is removed, after it kept; the last turn always has one
    "{%- set DEFAULT = '' %}\n"
    + QWEN_HEAD
    + """{%- set ns = namespace(query=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.found = true %}{%- set ns.query = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}"""
    + QWEN_TOOL
    + """    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

GEMMA_TURNS = """{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (prefix if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
GEMMA_2 = (
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    "{%- set turns = messages %}{%- set prefix = '' %}" + GEMMA_TURNS
)
GEMMA_3 = (  # the system message opens the first user turn
    "{{- bos_token }}{%- if messages[0].role == 'system' %}"
    "{%- set prefix = messages[0].content + '\\n\\n' %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set prefix = '' %}{%- set turns = messages %}{%- endif %}" + GEMMA_TURNS
)

MISTRAL_CHECK = """{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- for message in turns | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate') }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_TURNS = """{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' + tool.function | tojson + '}' + (']' if loop.last else ', ') }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- USER }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}{{- ANSWER + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_SMALL = (  # system prompt in separate tags; tools before the last question; no text with calls
    "{%- set system = 'You are Mistral Small.' %}{%- set turns = messages %}"
    "{%- if messages[0].role == 'system' %}"
    "{%- set system = messages[0].content %}{%- set turns = messages[1:] %}{%- endif %}\n"
    + MISTRAL_CHECK
    + "{{- bos_token + '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}\n"
    + MISTRAL_TURNS.replace("USER", "'[INST]' + message.content + '[/INST]'").replace("ANSWER", "message.content")
)
MISTRAL_7B = (  # the system prompt is in the last turn if it is a user turn, so never in training examples
    "{%- set turns = messages %}{%- if messages[0].role == 'system' %}{%- set turns = messages[1:] %}{%- endif %}\n"
    + MISTRAL_CHECK
    + "{{- bos_token }}\n"
    + MISTRAL_TURNS.replace(
        "USER",
        "'[INST] ' + (messages[0].content + '\\n\\n' if loop.last and messages[0].role == 'system' else '')"
        " + message.content + '[/INST]'",
    ).replace("ANSWER", "' ' + message.content")
)

PHI_3 = (  # omits tool results; ends all text with an end of text
    "{% for message in messages %}"
    "{% if message.role in ('system', 'user', 'assistant') %}"
    "{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
PHI_4 = (  # no line breaks; `tools` is part of the system message
    "{%- if messages[0].role == 'system' or tools %}"
    "{{- '<|system|>' + (messages[0].content if messages[0].role == 'system' else '') }}"
    "{%- if tools %}{{- '<|tool|>' + tools | tojson + '<|/tool|>' }}{%- endif %}{{- '<|end|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<|tool_response|>' + message.content | tojson + '<|end|>' }}"
    "{%- elif message.role != 'system' %}"
    "{{- '<|' + message.role + '|>' }}{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}"
    "{{- '<|tool_call|>' + call.function | tojson + '<|/tool_call|>' }}{%- endfor %}"
    "{{- '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- '<|endoftext|>' }}{%- endif %}"
)

DEEPSEEK_V3 = """{%- set ns = namespace(tool=false, system='') %}
{%- for message in messages if message.role == 'system' %}{%- set ns.system = message.content %}{%- endfor %}
{{- bos_token + ns.system + TOOLS }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.tool = false %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}
        {{- '' if ns.tool else '<｜tool▁outputs▁begin｜>' }}{%- set ns.tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<｜Assistant｜>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '\\n' if not loop.first else '' }}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}{%- set ns.tool = false %}
        {{- message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{{- '<｜tool▁outputs▁end｜>' if ns.tool else ('<｜Assistant｜>OPENED' if add_generation_prompt else '') }}""".replace(
    "TOOLS", "('\\n\\n## Tools\\n\\n' + tools | tojson if tools else '')"
)
"""Requires arguments as JSON text; removes all reasoning."""


def deepseek_calls(calls: list[dict]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['function']['name']}\n```json\n"
        f"{json.dumps(call['function']['arguments'], ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def mistral_calls(calls: list[dict]) -> str:
    return f"[TOOL_CALLS] {json.dumps([{**call['function'], 'id': call['id']} for call in calls], ensure_ascii=False)}"


def llama_calls(calls: list[dict]) -> str:
    (call,) = calls
    return spaced_json(call["function"]["name"], call["function"]["arguments"], key="parameters")


def spaced(content: str) -> str:
    return " " + content


LLAMA_SPECIALS = ("<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
QWEN_SPECIALS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>")
GEMMA_SPECIALS = ("<end_of_turn>", "<bos>", "<eos>", "<start_of_turn>")
PHI_ROLES = ("<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")
PHI_SPECIALS = (*PHI_ROLES, "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")
DEEPSEEK_SPECIALS = (
    *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *(f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{word}｜>" for word in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
)
MISTRAL_NAMES = ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "SYSTEM_PROMPT")
MISTRAL_SPECIALS = (
    *("</s>", "<s>", "[TOOL_CALLS]"),
    *(bracket for name in MISTRAL_NAMES for bracket in (f"[{name}]", f"[/{name}]")),
)
LLAMA: dict[str, Any] = {"bos": "<|begin_of_text|>", "says": str.strip}
MISTRAL: dict[str, Any] = {"bos": "<s>", "calls": mistral_calls, "text_and_calls": False}
GEMMA: dict[str, Any] = {"bos": "<bos>", "says": str.strip}
DEEPSEEK: dict[str, Any] = {"bos": "<｜begin▁of▁sentence｜>", "thinks": False, "calls": deepseek_calls}
TAGGED = joined("<tool_call>\n", "\n</tool_call>", "\n")

FAMILIES = {
    "Llama 3": Family(LLAMA_3_1, LLAMA_SPECIALS, calls=llama_calls, parallel=False, text_and_calls=False, **LLAMA),
    "Qwen 2.5": Family(QWEN_2_5, QWEN_SPECIALS, calls=TAGGED),
    "Qwen 3": Family(QWEN_3, QWEN_SPECIALS, calls=TAGGED, empty_thought="<think>\n\n</think>\n\n"),
    "Gemma 2": Family(GEMMA_2, GEMMA_SPECIALS, system=False, **GEMMA),
    "Gemma 3": Family(GEMMA_3, GEMMA_SPECIALS, **GEMMA),
    "Mistral Small": Family(MISTRAL_SMALL, MISTRAL_SPECIALS, **MISTRAL),
    "Mistral 7B": Family(MISTRAL_7B, MISTRAL_SPECIALS, system=False, says=spaced, **MISTRAL),
    "Phi 3": Family(PHI_3, PHI_ROLES),
    "Phi 4": Family(PHI_4, PHI_SPECIALS, calls=joined("<|tool_call|>", "<|/tool_call|>")),
    "DeepSeek V3": Family(DEEPSEEK_V3.replace("OPENED", ""), DEEPSEEK_SPECIALS, **DEEPSEEK),
    "DeepSeek R1": Family(DEEPSEEK_V3.replace("OPENED", "<think>\\n"), DEEPSEEK_SPECIALS, **DEEPSEEK),
}
"""Model-like templates by name; `system` is False if system messages are unsupported."""
