"""Which tokens of a conversation are trained with the chat templates of many model families."""

import json
import random

import pytest
from chat_tokenizers import (
    CHATML,
    DEEPSEEK_R1,
    GEMMA,
    GENERATION,
    LLAMA_3,
    OPENING,
    QWEN_3,
    TRAINABLE,
    VICUNA,
    make_tokenizer,
)
from template_settings import split_settings

from rlhf_cli.config.data import DataConfig, PromptConfig, TemplateConfig
from rlhf_cli.data.formats.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.errors import UsageError


def load(tmp_path, tokenizer, *conversations, **settings):
    """Load conversations given as [user, assistant, user, ...] texts or as lists of messages."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages_of(c)}) + "\n" for c in conversations))
    of_data, template = split_settings(settings)
    config = DataConfig(dataset=str(path), **of_data)
    return SEQUENCES.load(config, tokenizer, dataset=config.dataset, split="train", seed=0, template=template)


def messages_of(conversation):
    if conversation and isinstance(conversation[0], dict):
        return conversation
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(conversation)]


def trained_texts(tokenizer, sequence):
    """Return the text of each run of trained tokens."""
    runs, last = [], None
    for position, (token, trained) in enumerate(zip(sequence.token_ids, sequence.loss_mask, strict=True)):
        if trained and last == position - 1:
            runs[-1].append(token)
        elif trained:
            runs.append([token])
        last = position if trained else last
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", TRAINABLE)
def test_only_the_assistants_words_and_end_of_turn_are_trained(name, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name])
    conversation = ["What is 12 + 34?", "The answer is 46.", "What is the capital of France?", "Paris."]
    (sequence,) = load(tmp_path, tokenizer, conversation).items
    trained = [text.strip() for text in trained_texts(tokenizer, sequence)]
    expected = ["The answer is 46.<|im_end|>", OPENING.get(name, "") + "Paris.<|im_end|>"]
    assert [text.replace(" <|", "<|") for text in trained] == expected


@pytest.mark.parametrize("name", TRAINABLE)
def test_tokens_are_those_of_the_whole_rendered_text(name, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name])
    messages = messages_of(["What is 12 + 34?", "The answer is 46.", "Why?", "one\n\ntwo"])
    (sequence,) = load(tmp_path, tokenizer, messages).items
    assert sequence.token_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", TRAINABLE)
def test_any_text_comes_back_from_the_trained_tokens(name, trim_offsets, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name], trim_offsets=trim_offsets)
    chance = random.Random(name)
    words = [
        "Paris",
        "12",
        "+",
        "é",
        "👩‍🚀",
        "漢字",
        "\n",
        "\n\n",
        "  ",
        "(",
        "</s>",
        "user",
        "assistant",
        "\t",
        ".",
        "ASSISTANT:",
    ]
    conversations = [
        ["x" + " ".join(chance.choices(words, k=chance.randint(1, 12))) + "x" for _ in range(2 * chance.randint(1, 3))]
        for _ in range(40)
    ]
    data = load(tmp_path, tokenizer, *conversations)
    for conversation, sequence in zip(conversations, data.items, strict=True):
        trained = [text.strip().replace(" <|", "<|") for text in trained_texts(tokenizer, sequence)]
        *earlier, last = [text + "<|im_end|>" for text in conversation[1::2]]
        assert trained == [*earlier, OPENING.get(name, "") + last]
    assert data.report.merged_starts == 0


def test_chatml_row_by_hand(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    (sequence,) = load(tmp_path, tokenizer, ["user", "Paris"]).items
    before = "<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\n"
    parts = [tokenizer(text).input_ids for text in (before, "Paris<|im_end|>", "\n")]
    assert sequence.token_ids.tolist() == [*parts[0], *parts[1], *parts[2]]
    assert sequence.loss_mask.tolist() == [False] * len(parts[0]) + [True] * len(parts[1]) + [False]
    assert len(parts[2]) == 1


def test_template_that_strips_trains_the_stripped_text(tmp_path):
    tokenizer = make_tokenizer(LLAMA_3)
    (sequence,) = load(tmp_path, tokenizer, ["What?", " \n Paris \n"]).items
    assert trained_texts(tokenizer, sequence) == ["Paris<|im_end|>"]


def test_beginning_of_sequence_is_not_doubled(tmp_path):
    tokenizer = make_tokenizer(LLAMA_3, adds_bos=True)
    (sequence,) = load(tmp_path, tokenizer, ["What?", "Paris"]).items
    assert sequence.token_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert sequence.token_ids[0] == tokenizer.bos_token_id


def test_system_prompt_is_put_before_conversations_without_one(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    own = [{"role": "system", "content": "mine"}, *messages_of(["What?", "Paris"])]
    data = load(tmp_path, tokenizer, ["What?", "Paris"], own, system_prompt="yours")
    texts = [tokenizer.decode(sequence.token_ids) for sequence in data.items]
    assert texts[0].startswith("<|im_start|>system\nyours<|im_end|>\n<|im_start|>user\n")
    assert texts[1].startswith("<|im_start|>system\nmine<|im_end|>\n<|im_start|>user\n")


def test_what_the_template_refuses_is_told_with_its_reason_and_line(tmp_path):
    tokenizer = make_tokenizer(GEMMA)
    with_system = [{"role": "system", "content": "be brief"}, *messages_of(["What?", "Paris"])]
    with pytest.raises(UsageError, match=r"rows\.jsonl line 2: .*System role not supported"):
        load(tmp_path, tokenizer, ["What?", "Paris"], with_system)
    with pytest.raises(UsageError, match=r"System role not supported.*--tokenizer_chat_template"):
        load(tmp_path, tokenizer, ["What?", "Paris"], system_prompt="be brief")


def test_all_that_follows_the_generation_prompt_is_trained_as_the_model_has_to_generate_it(tmp_path):
    tokenizer = make_tokenizer(QWEN_3)
    (sequence,) = load(tmp_path, tokenizer, ["What?", "Paris", "And?", "Rome"]).items
    assert trained_texts(tokenizer, sequence) == ["Paris<|im_end|>", "<think>\n\n</think>\n\nRome<|im_end|>"]


def test_blocks_that_mark_more_than_the_words_train_what_follows_the_generation_prompt(tmp_path):
    over_header = GENERATION.replace(
        "{{ '<|im_start|>assistant\n' }}{% generation %}", "{% generation %}{{ '<|im_start|>assistant\n' }}"
    )
    with_thought = GENERATION.replace("{% generation %}", "{% generation %}{{ '<think></think>' }}")
    assert len({GENERATION, over_header, with_thought}) == 3
    for template, opening in ((over_header, ""), (with_thought, "<think></think>")):
        tokenizer = make_tokenizer(template)
        (sequence,) = load(tmp_path, tokenizer, ["What?", "Paris", "And?", "Rome"]).items
        assert trained_texts(tokenizer, sequence) == [f"{opening}Paris<|im_end|>", f"{opening}Rome<|im_end|>"]


TWO_ENDS = CHATML.replace(
    "'<|im_end|>' + '\n'", "('<|stop|>' if message['role'] == 'assistant' else '') + '<|im_end|>'"
)


def test_special_tokens_that_end_a_turn_together_are_all_trained(tmp_path):
    tokenizer = make_tokenizer(TWO_ENDS)  # like Cohere 2's
    (sequence,) = load(tmp_path, tokenizer, ["What?", "Paris", "And?", "Rome"]).items
    assert trained_texts(tokenizer, sequence) == ["Paris<|stop|><|im_end|>", "Rome<|stop|><|im_end|>"]


CHANNELS = """{%- for tool in tools or [] %}{{- 'tool ' + tool.function.name }}{%- endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant to=' + call.name + '<|start|>' + call.arguments | tojson + '<|stop|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant final<|start|>' + message.content + '<|im_end|>' }}
    {%- else %}{{- '<|im_start|>' + message.role + '<|start|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"""


def test_a_call_that_ends_with_a_token_of_its_own_ends_there_and_the_tools_answer_is_not_trained():
    template = ChatTemplate(make_tokenizer(CHANNELS))  # like gpt-oss
    call = Message("assistant", "", (ToolCall("weather", {"city": "Paris"}),))
    messages = (Message("user", "Weather?"), call, Message("tool", "sunny"), Message("assistant", "It is sunny."))
    found = template.example(Conversation(messages))
    assert [found.text[slice(*span)] for span in found.spans] == [
        ' to=weather<|start|>{"city": "Paris"}<|stop|>',
        " final<|start|>It is sunny.<|im_end|>",
    ]


def test_text_that_occurs_earlier_in_the_template_is_found_where_it_was_said(tmp_path):
    tokenizer = make_tokenizer(QWEN_3)
    conversation = ["think", "think", "think", "think"]
    (sequence,) = load(tmp_path, tokenizer, conversation).items
    assert trained_texts(tokenizer, sequence) == ["think<|im_end|>", "<think>\n\n</think>\n\nthink<|im_end|>"]
    text = tokenizer.decode(sequence.token_ids[: int(sequence.loss_mask.nonzero()[0][-1]) + 1])
    assert text.endswith("</think>\n\nthink<|im_end|>")


def test_thought_that_the_template_drops_is_refused(tmp_path):
    tokenizer = make_tokenizer(DEEPSEEK_R1)
    with pytest.raises(UsageError, match=r"line 2: the chat template leaves out the thought of the last turn, .*well"):
        load(tmp_path, tokenizer, ["What?", "Paris"], ["What?", "<think>\nwell\n</think>\n\nParis"])


def test_turn_that_the_template_leaves_out_is_not_found_in_a_later_one(tmp_path):
    forgetful = (
        "{% for message in messages %}{% if message['role'] == 'user' or loop.last or message['content'] != 'Paris' %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(UsageError, match="leaves out or alters"):
        load(tmp_path, make_tokenizer(forgetful), ["What?", "Paris", "Again?", "Paris"])


REFUSED = {
    "no end of turn": (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
        "no end of turn after the assistant's last text, so the model would never learn to stop",
    ),
    "no end of the last turn": (
        "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] }}{% endfor %}",
        "no end of turn after the assistant's last text, so the model would never learn to stop",
    ),
    "assistant left out": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
        "leaves out or alters the assistant's text",
    ),
    "upper case": (
        "{% for m in messages %}{{ '<|start|>' + m['content'] | upper + '<|im_end|>' }}{% endfor %}",
        "leaves out or alters the assistant's text",
    ),
    "space that runs into the answer": (
        VICUNA.replace("'ASSISTANT:' }}", "'ASSISTANT: ' }}"),
        "makes one token of the template's ' ' and the assistant's 'first'",
    ),
    "generation block without end of turn": (
        GENERATION.replace("'<|im_end|>\n' }}{% endgeneration %}", "'' }}{% endgeneration %}{{ '<|im_end|>\n' }}"),
        "generation block ends before the end-of-turn token '<|im_end|>'".replace("|", r"\|"),
    ),
    "broken": ("{% for m in messages %}", "does not take this conversation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_template_that_cannot_be_trained_on_is_refused_with_the_reason(name, tmp_path):
    template, reason = REFUSED[name]
    with pytest.raises(UsageError, match=reason):
        load(tmp_path, make_tokenizer(template), ["What?", "Paris"])


def test_space_that_runs_into_the_answer_is_noticed_where_offsets_hide_it(tmp_path):
    template = VICUNA.replace("'ASSISTANT:' }}", "'ASSISTANT: ' }}")
    with pytest.raises(UsageError, match=r"generation prompt, which ends in .* has other tokens alone"):
        load(tmp_path, make_tokenizer(template, trim_offsets=True), ["What?", "Paris"])


def test_leading_white_space_that_runs_into_the_template_carries_no_loss(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    data = load(tmp_path, tokenizer, ["What?", "\none"], ["What?", "one"])
    assert [trained_texts(tokenizer, sequence) for sequence in data.items] == [["one<|im_end|>"]] * 2
    assert data.report.merged_starts == 1
    assert "1 with leading white space" in data.report.summary


def test_response_that_runs_into_the_template_is_refused(tmp_path):
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] + '\n' }}"
        "{% else %}{{ 'Answer:' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
    )
    with pytest.raises(UsageError, match=r"line 2: the tokenizer makes one token of the template's ':' and .* '\('"):
        load(tmp_path, make_tokenizer(template), ["What?", "yes"], ["What?", "(yes)"])


def test_missing_template_names_both_ways_out(tmp_path):
    with pytest.raises(UsageError, match=r"no chat template.*--tokenizer_chat_template FILE.*--no_apply_chat_template"):
        load(tmp_path, make_tokenizer(None), ["What?", "Paris"])


def test_end_of_turn_is_reported(tmp_path):
    report = load(tmp_path, make_tokenizer(LLAMA_3), ["What?", "Paris"]).report
    assert report.end_of_turn == "<|im_end|>"
    assert "turns end with <|im_end|>" in report.summary


@pytest.mark.parametrize("name", sorted(TRAINABLE))
def test_a_response_ends_with_the_token_that_is_trained_behind_the_last_answer(name, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name])
    (sequence,) = load(tmp_path, tokenizer, ["What is 12 + 34?", "The answer is 46."]).items
    trained = sequence.token_ids[sequence.loss_mask]
    (end,) = ChatTemplate(tokenizer).end_ids
    assert end in trained
    assert tokenizer.decode(trained[: list(trained).index(end)]).strip().endswith("The answer is 46.")


def test_prompts_know_the_end_of_a_response_that_a_base_model_does_not_name(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "What?"}) + "\n")
    tokenizer = make_tokenizer(CHATML, eos="<|end|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id != end
    for given, expected in (({}, (end,)), ({"apply_chat_template": False}, ())):
        config, template = PromptConfig(prompt_data=str(file), max_len=200), TemplateConfig(**given)
        assert load_prompts(config, tokenizer, max_new_tokens=8, seed=0, template=template).end_ids == expected


@pytest.mark.parametrize("name", sorted(set(TRAINABLE) - {"DeepSeek R1"}))
def test_rollouts_start_from_the_tokens_that_training_saw(name, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name], adds_bos=True)
    (sequence,) = load(tmp_path, tokenizer, ["What is 12 + 34?", "The answer is 46."]).items
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "What is 12 + 34?"}) + "\n")
    (prompt,) = load_prompts(PromptConfig(prompt_data=str(path)), tokenizer, max_new_tokens=16, seed=0).prompts
    assert sequence.token_ids[: len(prompt.prompt_ids)].tolist() == prompt.prompt_ids
    assert not sequence.loss_mask[: len(prompt.prompt_ids)].any()
    assert tokenizer.decode(prompt.prompt_ids) == prompt.text


THINKS = CHATML.replace(
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}",
)


def test_variables_of_the_template_reach_prompts_and_those_of_a_row_win(tmp_path):
    path = tmp_path / "rows.jsonl"
    own: tuple[dict[str, bool] | str | None, ...] = ({}, {"enable_thinking": True}, '{"enable_thinking": false}', None)
    rows = [{"prompt": "What?", "chat_template_kwargs": kwargs} for kwargs in own]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def texts(setting):
        config, template = PromptConfig(prompt_data=str(path)), TemplateConfig(chat_template_kwargs=setting)
        data = load_prompts(config, make_tokenizer(THINKS), max_new_tokens=9, seed=0, template=template)
        return [prompt.text for prompt in data.prompts]

    assert [text.endswith("<think></think>") for text in texts({"enable_thinking": False})] == [True, False, True, True]
    assert [text.endswith("<think></think>") for text in texts("{}")] == [False, False, True, False]


def test_variables_of_the_template_that_are_wrong_are_refused_by_setting_and_by_row(tmp_path):
    with pytest.raises(ValueError, match="chat_template_kwargs: 'messages' is set by this program"):
        TemplateConfig(chat_template_kwargs='{"messages": []}')
    with pytest.raises(ValueError, match="chat_template_kwargs needs --apply_chat_template"):
        TemplateConfig(chat_template_kwargs='{"a": 1}', apply_chat_template=False)
    path = tmp_path / "rows.jsonl"
    for cell, said in (([1], "is no object of variables but"), ({"tools": []}, "'tools' is set by this program")):
        row = {"messages": messages_of(["What?", "Paris"]), "chat_template_kwargs": cell}
        path.write_text(json.dumps({"messages": messages_of(["What?", "Paris"])}) + "\n" + json.dumps(row) + "\n")
        config = DataConfig(dataset=str(path))
        with pytest.raises(UsageError, match=f"rows.jsonl line 2: .*{said}"):
            SEQUENCES.load(config, make_tokenizer(CHATML), dataset=config.dataset, split="train", seed=0)


READS_THINKING = CHATML.replace(
    "message['content']", "('<think>' + message.thinking + '</think>' if message.thinking else '') + message['content']"
)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_read_and_trained_whatever_the_row_and_the_template_call_it(key, tmp_path):
    tokenizer = make_tokenizer(READS_THINKING)  # like gpt-oss's
    answer = {"role": "assistant", "content": "Paris", key: "well"}
    (sequence,) = load(tmp_path, tokenizer, [{"role": "user", "content": "What?"}, answer]).items
    assert trained_texts(tokenizer, sequence) == ["<think>well</think>Paris<|im_end|>"]
