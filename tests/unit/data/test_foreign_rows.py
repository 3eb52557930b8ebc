"""Rows for other tools, in the formats of their real files."""

import json
import math
import re
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from chat_tokenizers import CHATML, make_tokenizer
from samples import sample_of

from rlhf_cli.config.data import DataConfig, PreferenceDataConfig, PromptConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.formats.dialogues import row_of_numbered
from rlhf_cli.data.formats.table import choose_format, choose_prompt_format
from rlhf_cli.data.preference_data import PAIRS
from rlhf_cli.data.prompts import Prompt, load_prompts
from rlhf_cli.data.reading.columns import Columns
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.data.rollouts import Branch, Episode, Generation
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels
from rlhf_cli.rewards.records import Score
from rlhf_cli.tracking.view.front_end import PAGE
from rlhf_cli.trainers.online.sample_rows import sample_row


def verl_row(number: int, source: str, truth: object) -> dict[str, object]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Question {number}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": "train",
            "index": number,
            "question": f"Bare {number}?",
            "answer": f"so\n#### {number}",
        },
    }


VERL = [verl_row(number, "openai/gsm8k", str(10 + number)) for number in range(4)]


@pytest.fixture
def verl_file(tmp_path) -> str:
    path = tmp_path / "train.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(VERL), path)
    return str(path)


def prompts(path: str, **settings):
    config = PromptConfig(prompt_data=path, **settings)
    return load_prompts(config, make_tokenizer(CHATML), max_new_tokens=16, seed=0)


def written(tmp_path, *rows, name: str = "rows.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_ground_truth_of_verls_rows_is_found_by_itself(verl_file):
    data = prompts(verl_file)
    assert [prompt.label for prompt in data.prompts] == ["10", "11", "12", "13"]
    assert "(prompt, label reward_model.ground_truth)" in data.report.summary
    assert "Question 3?" in data.prompts[3].text


def test_keys_with_dots_name_entries_of_objects(verl_file):
    data = prompts(verl_file, input_key="extra_info.question", label_key="extra_info.answer")
    assert [prompt.label for prompt in data.prompts][:2] == ["so\n#### 0", "so\n#### 1"]
    assert "Bare 3?" in data.prompts[3].text


@pytest.mark.parametrize("key", ["label_key", "input_key"])
def test_a_missing_entry_is_refused_with_the_entries_there_are(verl_file, key):
    with pytest.raises(UsageError, match=rf"no column 'reward_model\.truth' \(--{key}\), for 'reward_model' has style"):
        prompts(verl_file, **{key: "reward_model.truth"})


def test_a_column_whose_name_has_a_dot_is_that_column(tmp_path):
    path = written(tmp_path, {"prompt": "Q", "a.b": "column", "a": {"b": "entry"}})
    assert prompts(path, label_key="a.b").prompts[0].label == "column"


def test_an_object_is_no_label_and_the_entry_that_is_one_is_named(verl_file):
    with pytest.raises(UsageError, match=r"set --label_key reward_model\.ground_truth"):
        prompts(verl_file, label_key="reward_model")


def label_of(tmp_path, value, *verifiers: str) -> str | None:
    rows = load_rows(written(tmp_path, {"prompt": "Q", "label": value}), split="train", seed=0)
    form = choose_prompt_format(rows.sources[0], Columns(None), data_format="auto", verifiers=lambda row: verifiers)
    return form.read_label(rows[0])


def test_objects_and_lists_are_labels_of_the_verifiers_that_read_them(tmp_path):
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    assert json.loads(label_of(tmp_path, tests, "code") or "") == tests
    assert label_of(tmp_path, ["3", "5"], "math") == '["3", "5"]'
    with pytest.raises(UsageError, match=r"'label' is an object, which math cannot .* --label_key label\.KEY selects"):
        label_of(tmp_path, tests, "math")
    with pytest.raises(UsageError, match="'label' is a list, which exact cannot compare with"):
        label_of(tmp_path, ["3", "5"], "exact")


def test_sft_and_pairs_take_keys_with_dots(tmp_path):
    row = {"talk": {"q": "Q", "good": "A", "bad": "B"}}
    rows = load_rows(written(tmp_path, row), split="train", seed=0)
    read = choose_format(rows.sources[0], Columns("talk.q", "talk.good"), data_format="auto").read(rows[0])
    assert read == Conversation((Message("user", "Q"), Message("assistant", "A")))
    keys = {"input_key": "talk.q", "chosen_key": "talk.good", "rejected_key": "talk.bad"}
    config = PreferenceDataConfig(dataset=written(tmp_path, row), **keys)
    pairs = PAIRS.load(config, make_tokenizer(CHATML), dataset=config.dataset, split="train", seed=0)
    assert pairs.report.items == 1


ORZ: list[list[dict[str, Any]]] = [
    [
        {"from": "human", "value": f"Find {number}."},
        {"from": "assistant", "ground_truth": {"value": str(number), "raw_value": f"so {number}"}},
    ]
    for number in range(3)
]


def test_files_of_open_reasoner_zero_are_prompts_with_ground_truth(tmp_path):
    path = tmp_path / "orz.json"
    path.write_text(json.dumps(ORZ, indent=2))
    data = prompts(str(path))
    assert [prompt.label for prompt in data.prompts] == ["0", "1", "2"]
    assert "Find 2." in data.prompts[2].text


def test_the_same_pairs_as_datasets_reads_them_are_the_same_rows(tmp_path):
    rows = [{"0": human, "1": assistant} for human, assistant in ORZ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert [prompt.label for prompt in prompts(str(tmp_path / "saved")).prompts] == ["0", "1", "2"]
    for other in ({}, {"0": "text"}, {"question": ORZ[0][0]}):
        assert row_of_numbered(other) is other


def test_a_row_that_is_a_list_of_messages_is_a_conversation(tmp_path):
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([talk, talk]))
    assert [dict(row) for row in load_rows(str(path), split="train", seed=0)] == [{"messages": talk}] * 2


HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:"


@pytest.mark.parametrize("end", ["", " Because."])
def test_the_answer_at_the_end_of_a_transcript_is_no_part_of_a_prompt(tmp_path, end):
    data = prompts(written(tmp_path, {"chosen": HH + end, "rejected": HH + " No."}), input_key="chosen")
    said = [(message.role, message.content) for message in data.conversation_of(data.prompts[0]).messages]
    assert said == [("user", "Hi"), ("assistant", "Hello"), ("user", "Why?")]
    assert ("without its last answer" in data.report.summary) == bool(end)


def sequences(path: str, **settings):
    config = DataConfig(dataset=path, **settings)
    return SEQUENCES.load(config, make_tokenizer(CHATML), dataset=path, split="train", seed=0)


@pytest.mark.parametrize("label", [False, "false", "False"])
def test_responses_marked_as_undesirable_are_not_learned_from(tmp_path, label):
    path = written(tmp_path, {"prompt": "Q", "completion": "A", "label": True}, {"prompt": "Q", "completion": "B"})
    assert sequences(path).report.items == 2
    rows = [{"prompt": "Q", "completion": "A", "label": True}, {"prompt": "Q", "completion": "B", "label": label}]
    path = written(tmp_path, *rows)
    with pytest.raises(UsageError, match=r"line 2: label is false: .* use --invalid_rows drop to skip such rows"):
        sequences(path)
    assert sequences(path, invalid_rows="drop").report.dropped_invalid == 1


@pytest.mark.parametrize("label", [0, 0.0, "0", " 0 "])
def test_a_label_of_zero_is_undesirable_for_sft_as_it_is_for_kto(tmp_path, label):
    path = written(tmp_path, {"prompt": "Q", "completion": "A", "label": label})
    with pytest.raises(UsageError, match=r"line 1: label is 0, .*rename the column if the label is an answer"):
        sequences(path)


@pytest.mark.parametrize("label", [1, "1", True, "true", 72, "18", None, ["0"]])
def test_other_labels_leave_a_row_to_sft(tmp_path, label):
    path = written(tmp_path, {"prompt": "Q", "completion": "A", "label": label})
    assert sequences(path).report.items == 1


def test_an_empty_response_names_the_setting_that_drops_it(tmp_path):
    with pytest.raises(UsageError, match="the response is empty; use --invalid_rows drop to skip such rows"):
        sequences(written(tmp_path, {"prompt": "Q", "response": " "}))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_is_neither_text_nor_ground_truth(tmp_path, value):
    with pytest.raises(UsageError, match=r"column 'response' is not text but a float: -?inf"):
        sequences(written(tmp_path, {"prompt": "Q", "response": value}))
    with pytest.raises(UsageError, match=r"column 'label' is -?inf, which is not a ground truth"):
        prompts(written(tmp_path, {"prompt": "Q", "label": value}))


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    path = tmp_path / "twice.parquet"
    pa.parquet.write_table(pa.Table.from_arrays([pa.array(["Q"])] * 3, names=["prompt", "answer", "answer"]), path)
    with pytest.raises(UsageError, match=r"twice\.parquet names a column twice: prompt, answer, answer"):
        load_rows(str(path), split="train", seed=0)


def test_the_page_reads_columns_that_rows_of_samples_have():
    picture = PlacedPicture(picture_of_pixels("red", np.zeros((2, 2, 3), np.uint8)), 0, 1, token=1)
    prompt = Prompt([1], "p", "l", "d", 0, pictures=(picture,))
    branch = Branch([1], [2], ((0, 1),), ({"role": "user", "content": "p"},))
    episode = Episode(((0, 1),), (1.0,), opening="Begin.", cut="ended it at a limit", earlier=(branch,))
    score = Score(1.0, "correct", judgements=[{"reason": "right"}])
    row = sample_row(sample_of(prompt, Generation([1], [0.0], "stop", 0, episode), score, text="r"))
    scripts = [(PAGE / f"{name}.js").read_text() for name in ("sample", "samples", "groups")]
    read = {name for script in scripts for name in re.findall(r"\brow\.(\w+)\b(?!\()", script)}
    assert read <= {"step", "advantage", "number", "prompt_number", *row}


TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


def judged(path: str, **reward: Any):
    config, scoring = PromptConfig(prompt_data=path), RewardConfig(**reward)
    return load_prompts(config, make_tokenizer(CHATML), max_new_tokens=16, seed=0, reward=scoring)


def test_math_and_code_rows_of_skywork_lie_in_one_file(tmp_path):
    rows = [verl_row(0, "train-math-deepscaler", '["1/2"]'), verl_row(1, "train-code-taco-easy", TESTS)]
    data = judged(written(tmp_path, *rows), reward_funcs=["by_row"])
    assert [prompt.data_source for prompt in data.prompts] == ["train-math-deepscaler", "train-code-taco-easy"]
    assert json.loads(data.prompts[1].label or "") == TESTS
    with pytest.raises(
        UsageError, match=r"line 1: column 'reward_model\.ground_truth' is an object, which math cannot"
    ):
        judged(written(tmp_path, verl_row(0, "train-math-deepscaler", TESTS)), reward_funcs=["by_row"])


def test_the_verifier_of_a_row_may_stand_in_another_column(tmp_path):
    path = written(tmp_path, {"prompt": "Q", "answer": "1", "meta": {"task": "exact"}})
    data = judged(path, reward_funcs=["by_row"], reward_key="meta.task")
    assert data.prompts[0].data_source == "exact"


@pytest.mark.parametrize("prompt", ["Q", [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]])
def test_reward_files_get_whole_rows_and_other_rewards_none(tmp_path, prompt):
    path = written(tmp_path, {"prompt": prompt, "answer": "1", "level": 3})
    kept = judged(path, reward_func="reward.py")
    assert json.loads(kept.prompts[0].row or "") == {"prompt": prompt, "columns": dict(kept.row_of(kept.prompts[0]))}
    plain = judged(path, reward_funcs=["math"])
    assert plain.prompts[0].row is None
    assert plain.fingerprint != kept.fingerprint
