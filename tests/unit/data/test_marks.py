"""Keys of other tools that exclude turns, characters or rows from the loss: sft uses them, other commands reject
them.
"""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from chat_tokenizers import CHATML, GENERATION, make_tokenizer
from template_settings import split_settings

from rlhf_cli.config.data import DataConfig, LabelledDataConfig, PreferenceDataConfig, PromptConfig, StepDataConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.preference_data import PAIRS, RESPONSES
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.step_data import STEPS
from rlhf_cli.errors import UsageError
from rlhf_cli.trainers.offline.distill import taught_items

WHERE: dict[str, Any] = {"split": "train", "seed": 0}
TURNS = [("user", "one"), ("assistant", "first answer"), ("user", "two"), ("assistant", "second answer")]
WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

OUT: dict[str, dict[str, Any]] = {
    "OpenAI": {"weight": 0},
    "OpenAI in a CSV file's words": {"weight": "0"},
    "Axolotl": {"train": False},
    "Axolotl, a number": {"train": 0},
    "Axolotl's other word": {"training": False},
    "Axolotl's characters, all": {"train_detail": [{"begin_offset": 0, "end_offset": 11, "train": False}]},
    "ms-swift": {"loss": False},
    "ms-swift's scale": {"loss_scale": 0.0},
    "verl": {"loss_mask": 0},
    "torchtune": {"masked": True},
    "mask": {"mask": True},
    "trainable": {"trainable": False},
}
KEPT: dict[str, dict[str, Any]] = {
    "OpenAI": {"weight": 1},
    "Axolotl": {"train": True},
    "ms-swift": {"loss": True},
    "verl": {"loss_mask": 1},
    "torchtune": {"masked": False},
    "mask": {"mask": False},
    "null": {"weight": None, "train_detail": []},
}
ROW_OUT: dict[str, dict[str, Any]] = {
    "weight": {"weight": 0},
    "loss_mask": {"loss_mask": 0},
    "train": {"train": False},
    "masked": {"masked": True},
    "trainable": {"trainable": "false"},
}


def talk(mark: dict[str, Any] | None = None, place: int = 1) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in TURNS]
    messages[place] |= mark or {}
    return messages


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(tmp_path, *rows, template=CHATML, **settings):
    """Return the trained text of each sequence and the report."""
    path = written(tmp_path, *rows)
    tokenizer = make_tokenizer(template)
    of_data, shown = split_settings(settings)
    data = SEQUENCES.load(DataConfig(dataset=path, **of_data), tokenizer, dataset=path, template=shown, **WHERE)
    return [tokenizer.decode(s.token_ids[s.loss_mask]) for s in data.items], data.report


def plain(texts):
    return ["".join(text.replace("<|im_end|>", "|").split()) for text in texts]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
@pytest.mark.parametrize("mark", OUT)
def test_sft_leaves_the_marked_turn_out_and_trains_the_other(mark, template, tmp_path) -> None:
    texts, report = trained(tmp_path, {"messages": talk(OUT[mark])}, template=template)
    assert plain(texts) == ["secondanswer|"]
    assert report.marked_rows == 1
    assert "1 with text that a mark leaves out of the loss" in report.summary


@pytest.mark.parametrize("mark", KEPT)
def test_a_mark_that_trains_changes_nothing(mark, tmp_path) -> None:
    texts, report = trained(tmp_path, {"messages": talk(KEPT[mark])})
    assert plain(texts) == ["firstanswer|secondanswer|"]
    assert report.marked_rows == 0


@pytest.mark.parametrize("mark", ROW_OUT)
def test_a_mark_of_the_row_leaves_all_of_it_out(mark, tmp_path) -> None:
    rows = [{"messages": talk()} | ROW_OUT[mark], {"messages": talk()}, {"messages": talk(), "weight": 1}]
    texts, report = trained(tmp_path, *rows)
    assert plain(texts) == ["firstanswer|secondanswer|"] * 2
    assert report.dropped_untrained == 1
    assert report.noted["dropped_untrained"][0].endswith("line 1: nothing to train on: marks leave it out")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"loss_mask": [0, 0, 0, 1]}, "secondanswer|"),
        ({"loss_mask": [1, 1, 1, 0]}, "firstanswer|"),
        ({"loss_mask": [False, True]}, "secondanswer|"),
        ({"masked": [True, False, True, True]}, "firstanswer|"),
        ({"loss_mask": "[0, 1]"}, "secondanswer|"),
        ({"mask_history": True}, "secondanswer|"),
        ({"system": "S", "loss_mask": [0, 0, 0, 1]}, "secondanswer|"),
    ],
)
def test_lists_of_marks_are_by_message_or_by_turn_of_the_assistant(columns, expected, tmp_path) -> None:
    assert plain(trained(tmp_path, {"messages": talk()} | columns)[0]) == [expected]


def test_characters_of_train_detail_carry_no_loss_and_both_ends_belong_to_them(tmp_path) -> None:
    detail = [
        {"begin_offset": 0, "end_offset": 4, "train": False},
        {"begin_offset": 5, "end_offset": 11, "train": True},
    ]
    texts, _ = trained(tmp_path, {"messages": talk({"train_detail": detail})})
    assert plain(texts) == ["answer|secondanswer|"]


@pytest.mark.parametrize(
    "detail",
    [
        '[{"begin_offset": 0, "end_offset": 5, "train": false}]',
        {"begin_offset": [0], "end_offset": [5], "train": [False]},
        [{"begin_offset": 0.0, "end_offset": 5.0, "train": 0}],
    ],
    ids=["JSON text", "an object of lists", "numbers of a column with floats"],
)
def test_train_detail_is_read_in_the_forms_of_tables(detail, tmp_path) -> None:
    assert plain(trained(tmp_path, {"messages": talk({"train_detail": detail})})[0]) == ["answer|secondanswer|"]


def test_a_thought_is_trained_if_only_the_content_is_left_out(tmp_path) -> None:
    detail = {"train_detail": [{"begin_offset": 0, "end_offset": 12, "train": False}], "reasoning_content": "thought"}
    texts, report = trained(tmp_path, {"messages": talk(detail, 3)})
    assert plain(texts) == ["firstanswer|<think>thought</think>|"]
    assert report.marked_rows == 1


def test_calls_are_trained_if_only_the_content_before_them_is_left_out(tmp_path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = talk({"train_detail": [{"begin_offset": 0, "end_offset": 11, "train": False}], "tool_calls": [call]})
    row = {"messages": [*messages[:2], {"role": "tool", "content": "R"}, messages[3]]}
    texts, _ = trained(tmp_path, row, template=WITH_CALLS)
    assert '"name":"f"' in plain(texts)[0]
    assert "first" not in plain(texts)[0]


def test_parts_of_a_content_may_have_marks(tmp_path) -> None:
    messages = talk()
    hidden, shown = {"type": "text", "text": "first ", "train": False}, {"type": "text", "text": "answer", "weight": 1}
    messages[1]["content"] = [hidden, shown]
    assert plain(trained(tmp_path, {"messages": messages})[0]) == ["answer|secondanswer|"]


def test_a_token_with_a_character_that_is_left_out_carries_no_loss(tmp_path) -> None:
    detail = [{"begin_offset": 8, "end_offset": 8, "train": False}]
    path = written(tmp_path, {"messages": talk({"train_detail": detail})})
    tokenizer = make_tokenizer(CHATML)
    data = SEQUENCES.load(DataConfig(dataset=path), tokenizer, dataset=path, **WHERE)
    (sequence,) = data.items
    text = tokenizer.decode(sequence.token_ids)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    hidden = text.index("first answer") + 8
    covering = [start <= hidden < stop for start, stop in offsets]
    assert sum(covering) == 1
    assert not sequence.loss_mask[np.array(covering)].any()
    assert sequence.loss_mask[np.flatnonzero(covering)[0] - 1]


def test_marks_hold_without_a_chat_template_too(tmp_path) -> None:
    rows = [{"prompt": "Q", "response": "left"}, {"prompt": "Q", "response": "left", "weight": 0}]
    texts, report = trained(tmp_path, *rows, apply_chat_template=False)
    assert len(texts) == 1
    assert report.dropped_untrained == 1


def test_marks_of_a_parquet_file_count_and_its_filled_in_nulls_do_not(tmp_path) -> None:
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.Table.from_pylist([{"messages": talk({"loss": False})}, {"messages": talk()}]), path)
    tokenizer = make_tokenizer(CHATML)
    data = SEQUENCES.load(DataConfig(dataset=str(path)), tokenizer, dataset=str(path), **WHERE)
    texts = [tokenizer.decode(s.token_ids[s.loss_mask]) for s in data.items]
    assert plain(texts) == ["secondanswer|", "firstanswer|secondanswer|"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": talk({"weight": -0.5})}, "message 2 has weight -0.5, expected a number from 0"),
        ({"messages": talk({"loss_mask": 0.5})}, "message 2 has loss_mask 0.5, expected 1 or 0, .*belong in `weight`"),
        ({"messages": talk({"loss_scale": [1.0, 0.5]})}, r"message 2 has loss_scale \[1.0, 0.5\], expected a number"),
        (
            {"messages": talk({"content": [{"type": "text", "text": "first answer", "weight": 0.5}]})},
            "message 2 has a part with the loss weight 0.5",
        ),
        ({"messages": talk({"mask": 1})}, "message 2 has mask 1, which some tools exclude and others train"),
        ({"messages": talk({"train": True}, 0)}, "message 1 from user has train True, but only assistant turns"),
        ({"messages": talk({"ignore_loss": True})}, "message 2 has 'ignore_loss' True, which looks like a mark"),
        ({"messages": talk({"no_train": 1})}, "message 2 has 'no_train' 1, which looks like a mark"),
        ({"messages": talk({"train_detail": [{"begin_offset": 0, "end_offset": 12, "train": False}]})}, "0 to 11"),
        ({"messages": talk({"train_detail": "all"})}, "message 2 has train_detail 'all', expected"),
        ({"messages": talk(), "weight": "-1"}, "the row has weight '-1', expected a number from 0"),
        (
            {"text": "all of it", "weight": 0.5},
            "column 'weight' is 0.5: this marker excludes text from the loss or weigh",
        ),
        ({"messages": talk(), "loss_mask": [0, 1, 0]}, "column 'loss_mask' has 3 markers, but the row has 4 messages"),
        ({"messages": talk(), "assistant_masks": [0, 1]}, "column 'assistant_masks' is .*, which looks like a mark"),
        ({"messages": talk(), "loss_mask": "0 1"}, "column 'loss_mask' is '0 1', which is not a list"),
        ({"messages": talk(), "loss_mask": "[0, 1"}, "column 'loss_mask' is .*, which is not a list"),
        ({"messages": talk(), "exclude_from_training": True}, "column 'exclude_from_training' is True, which looks"),
        ({"messages": talk(), "train_on_inputs": True}, "column 'train_on_inputs' is True, which looks like a mark"),
        ({"messages": talk(), "turn_weights": [0.2, 1]}, "column 'turn_weights' is .*, which looks like a mark"),
        ({"text": "all of it", "loss_mask": 0}, "column 'loss_mask' is 0: this marker excludes text from the loss"),
    ],
)
def test_a_mark_that_cannot_be_honoured_is_refused_by_name(row, reason, tmp_path) -> None:
    with pytest.raises(UsageError, match=f"line 1: .*{reason}"):
        trained(tmp_path, row)


def weights_of(tmp_path, *rows, **settings) -> tuple[list[tuple[str, list[float]]], Any]:
    """Return trained text and token weights per sequence, [] without weights; and the data."""
    path = written(tmp_path, *rows)
    tokenizer = make_tokenizer(CHATML)
    of_data, shown = split_settings(settings)
    data = SEQUENCES.load(DataConfig(dataset=path, **of_data), tokenizer, dataset=path, template=shown, **WHERE)
    texts = plain([tokenizer.decode(s.token_ids[s.loss_mask]) for s in data.items])
    return [(t, s.columns.get("weights", np.zeros(0)).tolist()) for t, s in zip(texts, data.items, strict=True)], data


def weights_in_pack(sequences: list[TokenSequence]) -> list[float]:
    weights_K = pack(sequences).weights_K
    assert weights_K is not None
    found: list[float] = weights_K.tolist()
    return found


def test_weights_of_messages_and_rows_are_multiplied(tmp_path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": talk({"weight": 0.5})},
        {"messages": talk({"weight": 0}), "loss_scale": 2.0},
        {"messages": talk({"loss_weight": "0.25"}), "weight": 2},
        {"messages": talk(), "sample_weight": [None, 0.5, None, 1]},
        {"messages": talk({"weight": 1})},
    ]
    found, data = weights_of(tmp_path, *rows)
    # "first answer" and "second answer" have equally many tokens, n.
    n = len(found[0][1]) // 2
    assert [text for text, _ in found] == [
        "firstanswer|secondanswer|",
        "secondanswer|",
        *["firstanswer|secondanswer|"] * 3,
    ]
    first, second, third, fourth, fifth = (weights for _, weights in found)
    assert (first, second) == ([0.5] * n + [1.0] * n, [2.0] * n)
    assert (third, fourth, fifth) == ([0.5] * n + [2.0] * n, [0.5] * n + [1.0] * n, [])
    assert "4 with a loss weight other than 0 and 1" in data.report.summary
    assert weights_in_pack(data.items[:2]) == first + second
    assert weights_in_pack([data.items[4], data.items[1]]) == [1.0] * (2 * n) + second
    assert pack([data.items[4]]).weights_K is None
    with pytest.raises(
        UsageError, match=r"rows.jsonl line 1 has a loss weight other than 0 and 1, which only rlhf sft"
    ):
        taught_items(None, data)  # type: ignore[arg-type]


def test_the_end_of_a_plain_response_has_the_weight_of_its_text(tmp_path) -> None:
    row = {"messages": talk()[:2], "weight": 0.5}
    ((text, weights),), _ = weights_of(tmp_path, row, apply_chat_template=False)
    assert text.startswith("firstanswer")
    assert len(weights) > 2
    assert set(weights) == {0.5}


def test_pretrain_mode_and_a_mark_contradict_each_other(tmp_path) -> None:
    with pytest.raises(
        UsageError, match="a marker excludes text from the loss, but --pretrain_mode trains on all text"
    ):
        trained(tmp_path, {"messages": talk({"weight": 0})}, pretrain_mode=True)


def test_other_unknown_truths_of_a_turn_are_named_in_the_report(tmp_path) -> None:
    texts, report = trained(tmp_path, {"messages": talk({"is_good": False})})
    assert plain(texts) == ["firstanswer|secondanswer|"]
    assert "1 with the key 'is_good' in messages, which may be a mark and is not known" in report.summary


def load(command, path):
    tokenizer = make_tokenizer(CHATML)
    if command == "dpo and rm":
        PAIRS.load(PreferenceDataConfig(dataset=path), tokenizer, dataset=path, **WHERE)
    elif command == "kto":
        RESPONSES.load(LabelledDataConfig(dataset=path), tokenizer, dataset=path, **WHERE)
    elif command == "prm":
        STEPS.load(StepDataConfig(dataset=path), tokenizer, dataset=path, **WHERE)
    else:
        load_prompts(PromptConfig(prompt_data=path), tokenizer, max_new_tokens=9, seed=0)


@pytest.mark.parametrize("mark", OUT)
@pytest.mark.parametrize("command", ["dpo and rm", "kto"])
def test_commands_that_cannot_leave_a_trained_turn_out_refuse_the_row(command, mark, tmp_path) -> None:
    marked = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "first answer"} | OUT[mark]]
    pair = {"chosen": marked, "rejected": [marked[0], {"role": "assistant", "content": "worse"}]}
    path = written(tmp_path, {"messages": marked, "label": True} if command == "kto" else pair)
    with pytest.raises(
        UsageError, match="marked: this marker excludes text from the loss or weights it, which only sft, d"
    ):
        load(command, path)


@pytest.mark.parametrize("mark", ROW_OUT)
@pytest.mark.parametrize("command", ["dpo and rm", "kto", "prm", "online"])
def test_commands_that_cannot_leave_a_row_out_refuse_it(command, mark, tmp_path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "dpo and rm": {"prompt": "Q", "chosen": "A", "rejected": "B"},
        "kto": {"prompt": "Q", "response": "A", "label": True},
        "prm": {"prompt": "Q", "completions": ["A"], "labels": [True]},
        "online": {"prompt": "Q", "answer": "A"},
    }
    path = written(tmp_path, rows[command] | ROW_OUT[mark])
    with pytest.raises(UsageError, match=r"line 1: .*this marker excludes text from the loss"):
        load(command, path)


@pytest.mark.parametrize("mark", OUT)
def test_marks_in_a_prompt_change_nothing(mark, tmp_path) -> None:
    tokenizer = make_tokenizer(CHATML)
    last = [{"role": "user", "content": "two"}]
    path = written(tmp_path, {"prompt": [*talk(OUT[mark])[:2], *last], "chosen": "A", "rejected": "B"})
    (pair,) = PAIRS.load(PreferenceDataConfig(dataset=path), tokenizer, dataset=path, **WHERE).items
    assert plain([tokenizer.decode(pair.chosen.token_ids[pair.chosen.loss_mask])]) == ["A|"]
    (prompt,) = load_prompts(PromptConfig(prompt_data=path), tokenizer, max_new_tokens=9, seed=0).prompts
    assert "first answer" in prompt.text
