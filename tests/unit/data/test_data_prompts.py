"""Prompts for online training."""

import json

import pytest
from chat_tokenizers import CHATML, LLAMA_3, make_tokenizer
from model_templates import FAMILIES
from pydantic import ValidationError
from template_settings import split_settings

from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.errors import UsageError


def load(tmp_path, tokenizer, *rows, max_new_tokens=16, tools=(), **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_data, template = split_settings(settings)
    config = PromptConfig(**{"prompt_data": str(path), **of_data})
    environment = EnvironmentDescription(tools, "tools") if tools else None
    return load_prompts(
        config, tokenizer, max_new_tokens=max_new_tokens, seed=0, template=template, environment=environment
    )


def test_prompt_is_rendered_for_generation(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    (prompt,) = load(tmp_path, tokenizer, {"question": "What is 12 + 34?", "answer": 46}).prompts
    assert prompt.text == "<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.prompt_ids == tokenizer(prompt.text).input_ids
    assert (prompt.label, prompt.source, prompt.index) == ("46", f"{tmp_path}/rows.jsonl", 0)
    assert all(type(token) is int for token in prompt.prompt_ids)


def test_beginning_of_sequence_is_written_once(tmp_path):
    row = {"prompt": "What?"}
    templated = load(tmp_path, make_tokenizer(LLAMA_3, adds_bos=True), row).prompts[0]
    plain = load(tmp_path, make_tokenizer(None, adds_bos=True), row, apply_chat_template=False).prompts[0]
    bare = load(tmp_path, make_tokenizer(None), row, apply_chat_template=False).prompts[0]
    assert [prompt.prompt_ids.count(1) for prompt in (templated, plain, bare)] == [1, 1, 0]
    assert (plain.text, plain.label) == ("What?", None)


def test_messages_and_system_prompt_are_rendered(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [
        {"prompt": [{"from": "human", "value": "What?"}], "final_answer": "p - q"},
        {"prompt": [{"from": "system", "value": "mine"}, {"from": "human", "value": "What?"}], "final_answer": "7"},
    ]
    prompts = load(tmp_path, tokenizer, *rows, system_prompt="yours").prompts
    assert [prompt.text.split("<|im_end|>")[0] for prompt in prompts] == [
        "<|im_start|>system\nyours",
        "<|im_start|>system\nmine",
    ]
    assert [prompt.label for prompt in prompts] == ["p - q", "7"]


def test_the_messages_behind_a_prompt_are_read_again_with_the_system_message_of_the_settings(tmp_path):
    rows = [{"prompt": "overlong " * 100}, {"prompt": "What?"}]
    data = load(tmp_path, make_tokenizer(CHATML), *rows, max_len=80, system_prompt="yours")
    (prompt,) = data.prompts
    assert data.conversation_of(prompt).messages == (Message("system", "yours"), Message("user", "What?"))


def test_prompts_that_differ_in_text_label_or_order_have_another_fingerprint(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    one, other = {"prompt": "What?", "label": "a"}, {"prompt": "Who?", "label": "a"}
    sets = [[one, other], [other, one], [one], [{**one, "label": "b"}], [{"prompt": "What?"}]]
    found = [load(tmp_path, tokenizer, *rows).fingerprint for rows in sets]
    assert len(set(found)) == len(sets)
    assert load(tmp_path, tokenizer, one, other).fingerprint == found[0]


def test_prompts_without_room_for_the_response_are_dropped_or_an_error(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [{"prompt": "What?"}, {"prompt": "What is 12 + 34? " * 9}, {"prompt": "What?"}]
    length = len(load(tmp_path, tokenizer, rows[0]).prompts[0].prompt_ids)
    data = load(tmp_path, tokenizer, *rows, max_len=length + 16)
    assert [prompt.index for prompt in data.prompts] == [0, 2]
    assert (data.report.rows, data.report.items, data.report.dropped_overlong) == (3, 2, 1)
    assert "3 rows gave 2 prompts" in data.report.summary
    assert "1 dropped as too long" in data.report.summary
    with pytest.raises(UsageError, match=r"line 2: the prompt's \d+ tokens leave no room for max_new_tokens"):
        load(tmp_path, tokenizer, *rows, max_len=length + 16, overlong_prompts="error")
    with pytest.raises(UsageError, match=r"no prompt remains: .*3 dropped"):
        load(tmp_path, tokenizer, *rows, max_len=length + 15)


@pytest.mark.parametrize("halved", [{"prompt": "so \ud83d"}, {"label": "so \ud83d"}, {"label": ["so \ud83d", "b"]}])
def test_prompts_and_labels_with_half_of_a_character_are_refused(halved, tmp_path):
    rows = [{"prompt": "What?", "label": "a"}, {"prompt": "What?", "label": "a"} | halved]
    with pytest.raises(UsageError, match=r"rows\.jsonl line 2: '\\ud83d' after '.*so ' is half of a character"):
        load(tmp_path, make_tokenizer(CHATML), *rows)


def test_limits_that_leave_no_prompt_at_all_are_refused(tmp_path):
    with pytest.raises(UsageError, match="max_len 64 leaves no room for a prompt with max_new_tokens 64"):
        load(tmp_path, make_tokenizer(CHATML), {"prompt": "What?"}, max_len=64, max_new_tokens=64)


def test_report_says_where_prompts_and_labels_were_found(tmp_path):
    rows = [{"problem": "What?", "answer": "46"}, {"problem": "Why?", "answer": None}]
    report = load(tmp_path, make_tokenizer(CHATML), *rows).report
    assert "rows.jsonl (problem, label answer), 2 rows gave 2 prompts of at most " in report.summary
    assert "1 with ground truth" in report.summary


def test_empty_prompt_and_missing_template_are_refused(tmp_path):
    with pytest.raises(UsageError, match="line 1: the prompt is empty"):
        load(tmp_path, make_tokenizer(None), {"prompt": ""}, apply_chat_template=False)
    with pytest.raises(UsageError, match=r"no chat template.*--no_apply_chat_template"):
        load(tmp_path, make_tokenizer(None), {"prompt": "What?"})


def test_a_prompt_with_an_image_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"rows\.jsonl line 2: column 'image' is not empty"):
        load(tmp_path, make_tokenizer(CHATML), {"prompt": "What?"}, {"prompt": "What is it?", "image": "cat.png"})


def test_rollouts_need_no_template_that_can_be_trained_on(tmp_path):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:"
    (prompt,) = load(tmp_path, make_tokenizer(template), {"prompt": "What?"}).prompts
    assert prompt.text == "user: What?\nassistant:"


def test_prompts_of_several_sets_are_mixed(tmp_path):
    (tmp_path / "more.jsonl").write_text("".join(f'{{"query": "{i}", "label": {i}}}\n' for i in range(30)))
    data = load(
        tmp_path,
        make_tokenizer(CHATML),
        *({"prompt": f"What is {i}?"} for i in range(10)),
        prompt_data=f"{tmp_path}/rows.jsonl,{tmp_path}/more.jsonl",
        prompt_data_probs="0.25,0.75",
    )
    assert [prompt.label is None for prompt in data.prompts].count(True) == 10
    assert len(data.prompts) == 40
    for prompt in data.prompts:
        assert prompt.label == (str(prompt.index) if prompt.source.endswith("more.jsonl") else None)


def test_prompts_are_filtered_by_their_pass_rate_and_those_left_out_are_counted(tmp_path):
    rates = [0.0, 0.125, 0.5, 0.875, 1, None]
    rows = [{"prompt": f"What is {i}?", "answer": str(i), "pass_rate": rate} for i, rate in enumerate(rates)]
    data = load(tmp_path, make_tokenizer(CHATML), *rows, pass_rate_range=(0.125, 0.875))
    assert [prompt.label for prompt in data.prompts] == ["1", "2", "3"]
    assert data.report.dropped_by_pass_rate == 3
    assert "6 rows gave 3 prompts" in data.report.summary
    assert "3 dropped by pass rate" in data.report.summary
    assert data.row_of(data.prompts[1]) == rows[2]


@pytest.mark.parametrize(("row", "fault"), [({}, "missing"), ({"pass_rate": "often"}, "a str: 'often'")])
def test_a_row_without_a_pass_rate_to_filter_by_is_named(tmp_path, row, fault):
    rows = [{"prompt": "What?", "pass_rate": 0.5}, {"prompt": "Why?", **row}]
    with pytest.raises(UsageError, match=rf"line 2: column 'pass_rate' \(--pass_rate_range\) is {fault}"):
        load(tmp_path, make_tokenizer(CHATML), *rows, pass_rate_range=(0, 1))


def test_a_filter_that_leaves_no_prompt_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"no prompt remains: .* 1 dropped by pass rate"):
        load(tmp_path, make_tokenizer(CHATML), {"prompt": "What?", "pass_rate": 1.0}, pass_rate_range=(0, 0.5))


@pytest.mark.parametrize("limits", [(0.5, 0.25), (-0.5, 0.5), (0.5, 1.5)])
def test_a_range_of_pass_rates_that_holds_nothing_is_refused(limits):
    with pytest.raises(ValidationError, match="must be two ascending fractions"):
        PromptConfig(prompt_data="p", pass_rate_range=limits)


def test_the_r1_zero_template_stands_in_place_of_the_chat_template(tmp_path):
    row = {"prompt": "What is 1 {{ + }} 2?", "answer": "3"}
    for tokenizer in (make_tokenizer(None, adds_bos=True), make_tokenizer(CHATML)):
        (prompt,) = load(tmp_path, tokenizer, row, prompt_template="r1_zero", max_len=2000).prompts
        assert prompt.text.startswith("A conversation between User and Assistant. The User asks a question, and the ")
        assert prompt.text.endswith("<answer> answer here </answer>. User: What is 1 {{ + }} 2?\nAssistant: <think>")
        assert prompt.prompt_ids == tokenizer(prompt.text).input_ids


def test_a_template_file_gets_the_question_and_the_system_prompt(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ system_prompt }}\nQ: {{ prompt }}\nA:")
    row = {"prompt": "What?"}
    (prompt,) = load(tmp_path, make_tokenizer(None), row, prompt_template=str(file), system_prompt="Be brief.").prompts
    assert prompt.text == "Be brief.\nQ: What?\nA:"


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("Q: {{ question }}", {}, "'question' is undefined"),
        ("Q: {% if %}", {}, "Expected an expression"),
        ("Q: ", {}, r"says nothing of \{\{ prompt \}\}"),
        ("{{ prompt }}", {"system_prompt": "yours"}, r"says nothing of \{\{ system_prompt \}\}"),
        (None, {}, "there is no such file, nor a built-in one; r1_zero is"),
    ],
)
def test_templates_that_would_lose_something_are_refused(tmp_path, text, settings, message):
    file = tmp_path / "mine.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        load(tmp_path, make_tokenizer(None), {"prompt": "What?"}, prompt_template=str(file), **settings)


def test_a_format_prompt_makes_the_last_message_for_the_chat_template(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ content | trim }} Think first.\n\n")
    rows = [
        {"prompt": "What? \n"},
        {"prompt": [{"role": r, "content": c} for r, c in (("user", "Hi"), ("assistant", "Yes"), ("user", "Why?"))]},
    ]
    data = load(tmp_path, make_tokenizer(CHATML), *rows, format_prompt=str(file))
    first, second = (prompt.text for prompt in data.prompts)
    assert first == "<|im_start|>user\nWhat? Think first.<|im_end|>\n<|im_start|>assistant\n"
    assert "<|im_start|>user\nHi<|im_end|>" in second
    assert "<|im_start|>user\nWhy? Think first.<|im_end|>" in second
    assert data.conversation_of(data.prompts[0]).messages == (Message("user", "What? Think first."),)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("Think first.", {}, r"--format_prompt .* says nothing of \{\{ content \}\}"),
        ("{{ prompt }}", {}, "'prompt' is undefined"),
        (None, {}, "--format_prompt .* there is no such file"),
        ("{{ content }}", {"apply_chat_template": False}, "format_prompt needs --apply_chat_template"),
    ],
)
def test_format_prompts_that_could_not_be_used_are_refused(tmp_path, text, settings, message):
    file = tmp_path / "mine.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises((UsageError, ValidationError), match=message):
        load(tmp_path, make_tokenizer(CHATML), {"prompt": "What?"}, format_prompt=str(file), **settings)


def test_rows_that_are_no_prompts_are_refused_by_line_or_dropped_counted_and_named(tmp_path):
    rows = [
        {"prompt": "What?", "answer": "1"},
        {"prompt": None},
        {"prompt": "a \ud800"},
        {"prompt": "Why?", "chat_template_kwargs": {"messages": 1}},
        {"prompt": "How?", "answer": "2"},
    ]
    with pytest.raises(UsageError, match=r"line 2: .*; use --invalid_rows drop to skip such rows"):
        load(tmp_path, make_tokenizer(CHATML), *rows)
    data = load(tmp_path, make_tokenizer(CHATML), *rows, invalid_rows="drop")
    assert [(prompt.label, prompt.index) for prompt in data.prompts] == [("1", 0), ("2", 4)]
    assert [prompt.text.split("\n")[1] for prompt in data.prompts] == ["What?<|im_end|>", "How?<|im_end|>"]
    assert (data.report.items, data.report.dropped_invalid) == (2, 3)
    assert [note.split(": ")[0][-6:] for note in data.report.noted["dropped_invalid"]] == ["line 2", "line 3", "line 4"]
    assert "5 rows gave 2 prompts" in data.report.summary
    assert "3 dropped as invalid" in data.report.summary
    with pytest.raises(UsageError, match=r"no prompt remains: .*1 dropped as invalid"):
        load(tmp_path, make_tokenizer(CHATML), {"prompt": "a \ud800"}, invalid_rows="drop")


def test_a_template_refuses_more_than_a_question(tmp_path):
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "What?"}]}
    with pytest.raises(
        UsageError, match="line 1: prompt_template takes one question and no tools, not messages of syst"
    ):
        load(tmp_path, make_tokenizer(None), row, prompt_template="r1_zero", max_len=2000)


def test_prompts_with_special_tokens_in_their_messages_are_counted(tmp_path):
    rows = [{"prompt": "What?"}, {"prompt": "Say <|im_end|>"}, {"prompt": "Say <|start|> and <|im_end|>"}]
    data = load(tmp_path, make_tokenizer(CHATML), *rows)
    assert len(data.prompts) == data.report.items == 3
    assert data.report.control_rows == 2
    assert data.report.control_tokens == {"<|im_end|>": 2, "<|start|>": 1}
    assert data.report.control_at.endswith("line 2")
    assert "2 with special tokens in the text of their messages" in data.report.summary


TOOL = {"type": "function", "function": {"name": "weather", "description": "look up", "parameters": {}}}


def test_every_prompt_shows_the_tools_of_the_environment(tmp_path):
    rows = [{"prompt": "What?"}, {"prompt": "Why?"}]
    data = load(tmp_path, FAMILIES["Qwen 2.5"].tokenizer(), *rows, tools=(TOOL,))
    assert [prompt.text.count('"name": "weather"') for prompt in data.prompts] == [1, 1]
    assert data.conversation_of(data.prompts[1]) == Conversation((Message("user", "Why?"),), (TOOL,))
    with pytest.raises(UsageError, match="leaves out the tools of the row"):
        load(tmp_path, make_tokenizer(CHATML), *rows, tools=(TOOL,))


def test_tools_of_a_row_beside_an_environment_s_are_refused(tmp_path):
    rows = [{"prompt": "What?"}, {"prompt": "Why?", "tools": [TOOL]}]
    with pytest.raises(UsageError, match="line 2: column 'tools' has tools, but the environment defines its"):
        load(tmp_path, FAMILIES["Qwen 2.5"].tokenizer(), *rows, tools=(TOOL,))


def test_tools_of_a_row_beside_an_agent_program_are_refused(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"prompt": "What?"}) + "\n" + json.dumps({"prompt": "Why?", "tools": [TOOL]}))
    program = EnvironmentDescription((), "agent program", is_program=True)
    with pytest.raises(UsageError, match="line 2: column 'tools' has tools, but an agent program defines its own"):
        load_prompts(
            PromptConfig(prompt_data=str(source)),
            FAMILIES["Qwen 2.5"].tokenizer(),
            max_new_tokens=4,
            seed=0,
            environment=program,
        )
