"""Custom data formats: the documented example works with all kinds of data, and errors name the row."""

import json

import pytest
from conftest import make_tiny_tokenizer
from extending_page import page_file
from online_settings import resolve

from rlhf_cli.config.data import (
    KEYS_OF_LABELLED,
    LABELLED_FORMATS,
    PAIR_FORMATS,
    PROMPT_FORMATS,
    SEQUENCE_FORMATS,
    DataConfig,
    LabelledDataConfig,
    PreferenceDataConfig,
    PromptConfig,
    TemplateConfig,
)
from rlhf_cli.config.plugins import require_plugins
from rlhf_cli.data.cache import kept_path
from rlhf_cli.data.formats.preference import PROMPT_APART
from rlhf_cli.data.formats.table import FORMATS
from rlhf_cli.data.preference_data import PAIRS, RESPONSES
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.reading.columns import MESSAGE_KEYS
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.errors import UsageError

QUIZ = {"q": "Largest?", "options": {"A": "ant", "B": "bear"}, "right": "B"}
PLAIN = TemplateConfig(apply_chat_template=False)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "quiz.jsonl"
    path.write_text(json.dumps(QUIZ) + "\n" + json.dumps(QUIZ | {"right": "A"}) + "\n")
    return str(path)


def test_the_page_s_format_makes_prompts_and_labels(rows, tmp_path) -> None:
    code = f"{page_file(tmp_path, 'quiz_rows.py')}:of_quiz"
    config = resolve("rloo", prompt_data=rows, data_format=code, apply_chat_template=False)
    require_plugins(config)
    data = load_prompts(config.prompts, make_tiny_tokenizer(), max_new_tokens=9, seed=0, template=config.template)
    assert [(prompt.text, prompt.label) for prompt in data.prompts] == [
        ("Largest?\nA) ant\nB) bear", "B"),
        ("Largest?\nA) ant\nB) bear", "A"),
    ]


def test_the_page_s_format_makes_sequences(rows, tmp_path) -> None:
    code = f"{page_file(tmp_path, 'quiz_rows.py')}:of_quiz"
    tokenizer = make_tiny_tokenizer()
    data = SEQUENCES.load(
        DataConfig(dataset=rows, data_format=code), tokenizer, dataset=rows, split="train", seed=0, template=PLAIN
    )
    assert tokenizer.decode(data.items[0].token_ids).startswith("Largest?\nA) ant\nB) bear")
    assert "prompt -> answer" in data.report.summary


def test_pairs_and_labelled_responses_have_formats_of_others_too(rows, tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "def pair(row):\n    wrong = 'A' if row['right'] == 'B' else 'B'\n"
        "    return {'prompt': row['q'], 'chosen': row['right'], 'rejected': wrong}\n"
    )
    given = {"dataset": rows, "data_format": f"{tmp_path}/own.py:pair"}
    where = {"dataset": rows, "split": "train", "seed": 0, "template": PLAIN}
    assert len(PAIRS.load(PreferenceDataConfig(**given), make_tiny_tokenizer(), **where).items) == 2
    labelled = RESPONSES.load(LabelledDataConfig(**given), make_tiny_tokenizer(), **where)
    assert labelled.columns["desirable"].tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("return row['no']", r"quiz.jsonl line 1: --data_format .*own.py:f raises KeyError: 'no'"),
        ("return [row]", r"quiz.jsonl line 1: --data_format .*own.py:f has to return a dict, not list"),
        ("return {'x': 1}", "no format fits"),
    ],
)
def test_a_fault_of_the_code_names_the_row(code, reason, rows, tmp_path) -> None:
    (tmp_path / "own.py").write_text(f"def f(row): {code}\n")
    config = DataConfig(dataset=rows, data_format=f"{tmp_path}/own.py:f")
    with pytest.raises(UsageError, match=reason):
        SEQUENCES.load(config, make_tiny_tokenizer(), dataset=rows, split="train", seed=0, template=PLAIN)


def test_kept_data_is_made_anew_when_the_file_changes(rows, tmp_path) -> None:
    def kept() -> str:
        config = DataConfig(dataset=rows, data_format=f"{tmp_path}/own.py:f", data_cache=str(tmp_path / "cache"))
        loaded = load_rows(rows, split="train", seed=0, data_format=config.data_format)
        return str(kept_path(config, make_tiny_tokenizer(), loaded, kind="sequences", formats=[], template=PLAIN))

    (tmp_path / "own.py").write_text("def f(row): return row\n")
    first = kept()
    assert kept() == first
    (tmp_path / "own.py").write_text("def f(row): return {}\n")
    assert kept() != first


def test_settings_name_every_format_of_the_table() -> None:
    assert ("auto", *FORMATS) == SEQUENCE_FORMATS
    assert ("auto", *PROMPT_APART) == PAIR_FORMATS
    assert ("auto", *KEYS_OF_LABELLED) == LABELLED_FORMATS
    assert ("auto", "prompt", *MESSAGE_KEYS) == PROMPT_FORMATS


def test_a_key_beside_a_format_of_others_is_a_column_that_it_makes() -> None:
    PromptConfig(prompt_data="x", data_format="a:b", input_key="made")
    DataConfig(dataset="x", data_format="a:b", output_key="made")
    LabelledDataConfig(dataset="x", data_format="a:b", output_key="made")
