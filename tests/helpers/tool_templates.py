"""More tool call notations of released models: tags, names in headers, names after tokens."""

import json

from model_templates import QWEN_SPECIALS, Family

TOOL_LIST = "{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}"
RESPONSES = (
    "{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}CLOSE{%- endif %}"
)

QWEN_TAGS = (  # one tag per argument; text unquoted, other values as Python or JSON
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    + TOOL_LIST
    + "{{- '<|im_end|>\\n' }}{%- endif %}"
    + """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
        RESPONSES
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n\\n' if loop.first and message.content else '\\n' if not loop.first else '') }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<parameter=' + key + '>\\n' }}
                {%- set is_list = value is sequence and value is not string %}
                {{- (value | tojson if value is mapping or is_list else value | string) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""".replace(
        "RESPONSES", RESPONSES.replace("CLOSE", "{{- '<|im_end|>\\n' }}")
    )
)
GLM = (  # the next message's header ends a turn; keys and values in separate tags
    "{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' }}"
    + TOOL_LIST
    + "{%- endif %}"
    + """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
)
GPT_OSS = (  # tool in the header; calls have a special end, and results contain the last call's tool
    "{{- '<|start|>system<|message|>' }}"
    + TOOL_LIST
    + """{{- '<|end|>' }}
{%- set ns = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
        {%- set ns.name = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
        {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if ns.name is none %}{{- raise_exception('no previous message with a tool call') }}{%- endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
)
MISTRAL_11 = (  # each call after a token: name, token, arguments
    "{{- bos_token + '[AVAILABLE_TOOLS]' }}"
    + TOOL_LIST
    + """{{- '[/AVAILABLE_TOOLS]' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""
)
PYTHONIC = (  # Python list of calls
    QWEN_TAGS.split("{%- for call")[0]
    + """{%- for call in message.tool_calls or [] %}
            {{- '<|tool_call_start|>[' if loop.first else ', ' }}{{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- (', ' if not loop.first else '') + key + '=' }}
                {%- if value is string %}{{- "'" + value + "'" }}
                {%- else %}{{- value | string }}{%- endif %}
            {%- endfor %}
            {{- ')' + (']<|tool_call_end|>' if loop.last else '') }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)
GEMMA_4 = (  # unquoted keys, text between tokens, text after calls; results continue the turn
    "{{- bos_token + '<|turn>system\n' }}"
    + TOOL_LIST
    + """{{- '<turn|>\n' }}
{%- macro write(value) %}
    {%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
    {%- elif value is mapping %}{{- '{' }}
        {%- for key, inner in value.items() %}
            {{- (',' if not loop.first else '') + key + ':' + write(inner) }}
        {%- endfor %}
        {{- '}' }}
    {%- elif value is iterable %}{{- '[' }}
        {%- for inner in value %}{{- (',' if not loop.first else '') + write(inner) }}{%- endfor %}{{- ']' }}
    {%- else %}{{- value | tojson }}{%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '<|tool_response>response:' + write(message.content) + '<tool_response|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|turn>model\n' }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call>call:' + call.function.name + write(call.function.arguments) + '<tool_call|>' }}
        {%- endfor %}
        {{- message.content or '' }}{%- if loop.last %}{{- '<|tool_response>' }}{%- endif %}
    {%- else %}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
        {{- message.content + '<turn|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|turn>model\n' }}{%- endif %}"""
)
UNREADABLE = QWEN_TAGS.split("{%- for call")[0] + (  # calls as an assignment
    "{%- for call in message.tool_calls or [] %}{{- call.function.name + ' := ' }}"
    "{%- for key, value in call.function.arguments.items() %}{{- key + ' ' + value | string }}{%- endfor %}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def tagged(head: str, argument: str, foot: str, between: str = "\n", as_text=json.dumps):
    """Write calls with one tag per argument."""

    def one(call: dict) -> str:
        written = ((key, value if isinstance(value, str) else as_text(value)) for key, value in _arguments(call))
        return head.format(call["function"]["name"]) + "".join(argument.format(*pair) for pair in written) + foot

    return lambda calls: between.join(map(one, calls))


def _arguments(call: dict):
    return call["function"]["arguments"].items()


def python_or_json(value: object) -> str:
    """Write a value as in Qwen's tags."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def gpt_oss_calls(calls: list[dict]) -> str:
    (call,) = calls
    return f" to=functions.{call['function']['name']}<|channel|>commentary json<|message|>" + as_json(
        call["function"]["arguments"]
    )


def mistral_11_calls(calls: list[dict]) -> str:
    return "".join(
        f"[TOOL_CALLS]{call['function']['name']}[CALL_ID]{call['id']}[ARGS]{as_json(call['function']['arguments'])}"
        for call in calls
    )


def python_calls(calls: list[dict]) -> str:
    each = (
        f"{call['function']['name']}({', '.join(f'{key}={value!r}' for key, value in _arguments(call))})"
        for call in calls
    )
    return "<|tool_call_start|>[" + ", ".join(each) + "]<|tool_call_end|>"


def gemma_value(value: object) -> str:
    """Write a value between brackets or tokens."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def gemma_calls(calls: list[dict]) -> str:
    functions = [call["function"] for call in calls]
    return "".join(
        f"<|tool_call>call:{function['name']}{gemma_value(function['arguments'])}<tool_call|>" for function in functions
    )


qwen_tags = tagged(
    "<tool_call>\n<function={}>\n",
    "<parameter={}>\n{}\n</parameter>\n",
    "</function>\n</tool_call>",
    as_text=python_or_json,
)
glm_calls = tagged(
    "\n<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>", "", as_text=as_json
)
GLM_SPECIALS = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>", "[gMASK]", "<sop>")
GPT_SPECIALS = ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>")
MISTRAL_11_SPECIALS = (
    *("</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[CALL_ID]"),
    *("[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
)
GEMMA_4_SPECIALS = (
    *("<turn|>", "<|turn>", "<bos>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)
TOOL_FAMILIES = {
    "Qwen with tags": Family(QWEN_TAGS, QWEN_SPECIALS, calls=qwen_tags),
    "GLM": Family(GLM, GLM_SPECIALS, calls=glm_calls),
    "gpt-oss": Family(GPT_OSS, GPT_SPECIALS, calls=gpt_oss_calls, parallel=False),
    "LFM 2": Family(PYTHONIC, (*QWEN_SPECIALS, "<|tool_call_start|>", "<|tool_call_end|>"), calls=python_calls),
    "Gemma 4": Family(GEMMA_4, GEMMA_4_SPECIALS, bos="<bos>", calls=gemma_calls),
    "Mistral 11": Family(MISTRAL_11, MISTRAL_11_SPECIALS, bos="<s>", calls=mistral_11_calls),
}
"""Like `FAMILIES`, for tests of calls and turns only: GLM's template has no trainable end of turn."""
