"""Teachers by source: which teacher scores which row."""

import json
from typing import Any

import pytest
from chat_tokenizers import CHATML, make_tokenizer
from online_settings import resolve

from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.teachers import source_of_teacher, teachers_of
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.teachers import teachers_of_prompts
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.trainers.offline.distill import taught_items

BY_SOURCE = {"code": "c", "math_*": "m", "other": "c"}


def settings(command: str = "reinforce++", by_source: dict[str, str] | None = None, **given: Any) -> Any:
    text = json.dumps(BY_SOURCE if by_source is None else by_source)
    least = {"pretrain": "p", "teacher_pretrain": "t", "teacher_by_source": text} | given
    if command == "distill":
        return build_config(DistillConfig, least | {"dataset": "d", "output": "o"})
    return resolve(command, **least)


def prompts(*sources: str | None) -> list[Prompt]:
    return [Prompt([1], "", None, "rows.jsonl", number, source) for number, source in enumerate(sources)]


def test_a_name_precedes_a_pattern_and_equal_teachers_are_one():
    assert source_of_teacher("math_1", {"math_*": "a", "math_1": "b"}) == "math_1"
    assert [source_of_teacher(source, BY_SOURCE) for source in ("math_9", "maths", "code")] == ["math_*", None, "code"]
    assert teachers_of("t", json.dumps(BY_SOURCE)) == ("t", "c", "m")
    assert teachers_of("c", json.dumps(BY_SOURCE)) == ("c", "m")
    assert teachers_of("t", None) == ("t",)


def test_prompts_have_the_teacher_of_their_data_source_or_dataset():
    rows = prompts("math_9", "code", None, "other", "chat")
    found = teachers_of_prompts(settings(), rows)
    assert found is not None
    assert [prompt.teacher for prompt in found.of_prompts(rows)] == [2, 1, 0, 1, 0]
    assert [prompt.teacher for prompt in found.of_prompts(rows)[1:3]] == [1, 0]
    assert found.summary == "t (2 prompts), c (2 prompts), m (1 prompts)"
    by_dataset = teachers_of_prompts(settings(by_source={"rows.jsonl": "r"}), rows[2:3])
    assert by_dataset is not None
    assert by_dataset.numbers.tolist() == [1]
    assert teachers_of_prompts(resolve("reinforce++", pretrain="p", teacher_pretrain="t"), rows) is None


def test_an_entry_without_a_row_is_refused():
    with pytest.raises(UsageError, match=r"no row has the source 'other'; sources of prompts: math_1"):
        teachers_of_prompts(settings(), prompts("math_1", "code", "math_1"))


@pytest.mark.parametrize("text", ['{"code": 3}', '{"code": " "}', '["a"]', "{"])
def test_what_names_no_model_is_refused_before_anything_is_read(text):
    with pytest.raises(UsageError, match=r"--teacher_by_source .*(is not a model folder|must be a JSON object)"):
        resolve("gkd", pretrain="p", teacher_pretrain="t", teacher_by_source=text)


def test_teachers_by_source_need_a_teacher_for_all_other_rows():
    with pytest.raises(UsageError, match="teacher_by_source needs --teacher_pretrain"):
        resolve("grpo", pretrain="p", teacher_by_source='{"code": "c"}', reward_funcs="exact")


@pytest.mark.parametrize("command", ["distill", "gkd"])
def test_ranks_that_share_sequences_do_not_go_with_teachers_by_source(command):
    with pytest.raises(UsageError, match="teacher_by_source does not support sequence_parallel_size"):
        settings(command, sequence_parallel_size="2")


def test_rows_with_fixed_responses_have_teachers_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    sources = ("code", "chat", "math_2", "other")
    rows = [{"prompt": "Question?", "response": "Answer.", "data_source": source} for source in sources]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(dataset=str(path), max_len=64)
    loaded = SEQUENCES.load(data, make_tokenizer(CHATML), dataset=str(path), split="train", seed=0)
    items = taught_items(settings("distill"), loaded)
    assert [sequence.teacher for sequence in items.sequences] == [1, 0, 2, 1]
    batch = items.collate([1, 3, 2])
    targets = [reading.pack.targets_K.numel() for reading in batch.readings]
    assert targets == [loaded.items[0].num_trained] * 3
    per_row = targets[0]
    assert [reading.rows_k.tolist()[0] for reading in batch.readings if reading.rows_k is not None] == [
        0,
        per_row,
        2 * per_row,
    ]
