"""Tokenised preference pairs and labelled responses: prompt, trained tokens, truncated and dropped rows."""

import json
import random

import numpy as np
import pytest
from chat_tokenizers import CHATML, LLAMA_3, OPENING, QWEN_3, TRAINABLE, make_tokenizer
from pydantic import ValidationError
from template_settings import split_settings

from rlhf_cli.config.data import LabelledDataConfig, PreferenceDataConfig
from rlhf_cli.data import loading
from rlhf_cli.data.preference_data import PAIRS, RESPONSES
from rlhf_cli.errors import UsageError

PLAIN = {"apply_chat_template": False, "input_template": "Q: {}\\nA:"}
ASKED = {"prompt": "What is 12 + 34?", "chosen": "The answer is 46.", "rejected": "The answer is 12."}


def write(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(tmp_path, tokenizer, *rows, **settings):
    of_data, template = split_settings(settings)
    config = PreferenceDataConfig(**{"dataset": write(tmp_path, rows), **of_data})
    return PAIRS.load(config, tokenizer, dataset=config.dataset, split="train", seed=0, template=template)


def labelled(tmp_path, tokenizer, *rows, **settings):
    of_data, template = split_settings(settings)
    config = LabelledDataConfig(**{"dataset": write(tmp_path, rows), **of_data})
    return RESPONSES.load(config, tokenizer, dataset=config.dataset, split="train", seed=0, template=template)


def trained(tokenizer, branch):
    return tokenizer.decode(branch.token_ids[branch.loss_mask]).strip().replace(" <|", "<|")


def dialogue(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("name", TRAINABLE)
def test_each_branch_trains_its_response_and_the_end_of_turn(name, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name])
    (pair,) = pairs(tmp_path, tokenizer, ASKED).items
    opening = OPENING.get(name, "")
    assert trained(tokenizer, pair.chosen) == opening + "The answer is 46.<|im_end|>"
    assert trained(tokenizer, pair.rejected) == opening + "The answer is 12.<|im_end|>"
    for branch in (pair.chosen, pair.rejected):
        assert tokenizer.decode(branch.token_ids[-1:]) == "<|im_end|>"
        assert branch.loss_mask[-1]


@pytest.mark.parametrize("name", TRAINABLE)
def test_prompt_is_all_that_both_sides_begin_with_and_none_of_what_is_trained(name, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name], adds_bos=True)
    row = {
        "chosen": dialogue("What?", "one", "Why?", "The answer is 46."),
        "rejected": dialogue("What?", "one", "Why?", "The answer is 12."),
    }
    (pair,) = pairs(tmp_path, tokenizer, row).items
    for side, branch in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        whole = tokenizer.apply_chat_template(row[side], return_dict=False)
        both = [*pair.prompt_ids.tolist(), *branch.token_ids.tolist()]
        assert both == whole[: len(both)]
        assert branch.loss_mask[0]  # both sides begin with 'The answer is', which is not part of the prompt
        assert trained(tokenizer, branch) == OPENING.get(name, "") + row[side][-1]["content"] + "<|im_end|>"
    assert "Why?" in tokenizer.decode(pair.prompt_ids)
    assert pair.prompt_ids.dtype == pair.chosen.token_ids.dtype == np.int32


@pytest.mark.parametrize("name", TRAINABLE)
def test_prompt_and_branches_are_the_whole_texts_whatever_they_say(name, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name])
    chance = random.Random(name)
    words = ["Paris", "12", "é", "👩‍🚀", "漢字", "\n\n", "  ", "(", "</s>", "assistant", "\t", ".", "ASSISTANT:"]

    def text(end):
        return "x" + " ".join(chance.choices(words, k=chance.randint(1, 8))) + end

    rows = []
    for _ in range(40):
        prompt = [text("x") for _ in range(chance.choice((1, 3)))]
        begun = text("")  # both sides may share a prefix, also with the prompt
        rows.append({side: dialogue(*prompt, begun + text(end)) for side, end in (("chosen", "y"), ("rejected", "z"))})
    data = pairs(tmp_path, tokenizer, *rows)
    for row, pair in zip(rows, data.items, strict=True):
        for side, branch in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            whole = tokenizer.apply_chat_template(row[side], return_dict=False)
            both = [*pair.prompt_ids.tolist(), *branch.token_ids.tolist()]
            assert both == whole[: len(both)]
            assert trained(tokenizer, branch) == OPENING.get(name, "") + row[side][-1]["content"] + "<|im_end|>"


def test_pair_by_hand(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    (pair,) = pairs(tmp_path, tokenizer, {"prompt": "user", "chosen": "Paris", "rejected": "Rome"}).items
    prompt = "<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\n"
    assert pair.prompt_ids.tolist() == tokenizer(prompt).input_ids
    assert pair.chosen.token_ids.tolist() == tokenizer("Paris<|im_end|>").input_ids
    assert pair.rejected.token_ids.tolist() == tokenizer("Rome<|im_end|>").input_ids
    assert pair.chosen.loss_mask.all()
    assert pair.rejected.loss_mask.all()


def test_plain_text_has_the_prompt_apart_and_ends_with_the_end_of_sequence(tmp_path):
    tokenizer = make_tokenizer(None, adds_bos=True)
    (pair,) = pairs(tmp_path, tokenizer, ASKED, **PLAIN).items
    assert tokenizer.decode(pair.prompt_ids) == "<|bos|>Q: What is 12 + 34?\nA:"
    assert trained(tokenizer, pair.chosen) == "The answer is 46.<|end|>"
    assert trained(tokenizer, pair.rejected) == "The answer is 12.<|end|>"


def test_turns_of_the_user_within_a_branch_are_not_trained(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    row = {"chosen": dialogue("What?", "one", "Why?", "two"), "rejected": dialogue("What?", "three", "Who?", "four")}
    (pair,) = pairs(tmp_path, tokenizer, row).items
    assert tokenizer.decode(pair.prompt_ids).endswith("What?<|im_end|>\n<|im_start|>assistant\n")
    assert trained(tokenizer, pair.chosen) == "one<|im_end|>two<|im_end|>"
    assert trained(tokenizer, pair.rejected) == "three<|im_end|>four<|im_end|>"
    assert "Why?" in tokenizer.decode(pair.chosen.token_ids)


def test_what_a_template_writes_differently_before_the_response_is_not_prompt(tmp_path):
    # Qwen 3's template puts an empty thought only before the last turn, where the sides diverge.
    tokenizer = make_tokenizer(QWEN_3)
    row = {"chosen": dialogue("What?", "one"), "rejected": dialogue("What?", "three", "Why?", "four")}
    (pair,) = pairs(tmp_path, tokenizer, row).items
    assert tokenizer.decode(pair.prompt_ids).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(pair.chosen.token_ids).startswith("<think>\n\n</think>\n\none")
    assert trained(tokenizer, pair.chosen) == "<think>\n\n</think>\n\none<|im_end|>"
    assert trained(tokenizer, pair.rejected) == "three<|im_end|><think>\n\n</think>\n\nfour<|im_end|>"


def test_system_prompt_is_put_before_both_sides(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    (pair,) = pairs(tmp_path, tokenizer, ASKED, system_prompt="be brief").items
    assert tokenizer.decode(pair.prompt_ids).startswith("<|im_start|>system\nbe brief<|im_end|>\n")


def test_margins_are_kept_and_counted(tmp_path):
    data = pairs(tmp_path, make_tokenizer(CHATML), ASKED | {"margin": 2}, ASKED | {"margin": None}, ASKED)
    assert [pair.margin for pair in data.items] == [2.0, None, None]
    assert "1 with a margin" in data.report.summary


def test_arrays_and_report_count_what_the_pairs_hold(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [{"prompt": f"What is {i}?", "chosen": f"{i}." * (i % 5 + 1), "rejected": "no"} for i in range(700)]
    data = pairs(tmp_path, tokenizer, *rows)
    assert data.columns["prompt_length"].tolist() == [pair.prompt_ids.size for pair in data.items]
    assert data.columns["chosen_length"].tolist() == [len(pair.chosen) for pair in data.items]
    assert data.columns["rejected_length"].tolist() == [len(pair.rejected) for pair in data.items]
    masks = [np.concatenate([pair.chosen.loss_mask, pair.rejected.loss_mask]) for pair in data.items]
    assert data.columns["num_trained"].tolist() == [int(mask.sum()) for mask in masks]
    assert data.columns["num_trained"].dtype == data.columns["prompt_length"].dtype == np.int32
    assert (
        data.report.tokens
        == (data.columns["prompt_length"] + data.columns["chosen_length"] + data.columns["rejected_length"]).sum()
    )
    assert data.report.trained_tokens == data.columns["num_trained"].sum()
    assert "rows.jsonl (prompt -> chosen, rejected), 700 rows gave 700 pairs of" in data.report.summary
    for i in (0, 511, 512, 699):
        assert trained(tokenizer, data.items[i].chosen) == rows[i]["chosen"] + "<|im_end|>"


def test_truncation_cuts_each_branch_and_fakes_no_end(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    row = ASKED | {"chosen": "The answer is 46. " * 9}
    (whole,) = pairs(tmp_path, tokenizer, row).items
    data = pairs(tmp_path, tokenizer, row, max_len=whole.prompt_ids.size + len(whole.rejected))
    (cut,) = data.items
    assert cut.prompt_ids.tolist() == whole.prompt_ids.tolist()
    assert cut.rejected.token_ids.tolist() == whole.rejected.token_ids.tolist()
    assert cut.chosen.token_ids.tolist() == whole.chosen.token_ids[: len(whole.rejected)].tolist()
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in cut.chosen.token_ids
    assert data.report.truncated == 1


def test_branch_cut_within_a_turn_of_the_user_ends_with_the_turn_before(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    row = {"chosen": dialogue("What?", "one", "Why?", "two"), "rejected": dialogue("What?", "three")}
    (whole,) = pairs(tmp_path, tokenizer, row).items
    max_len = whole.prompt_ids.size + whole.chosen.token_ids.tolist().index(tokenizer("Why?").input_ids[0]) + 1
    (cut,) = pairs(tmp_path, tokenizer, row, max_len=max_len).items
    assert tokenizer.decode(cut.chosen.token_ids) == "one<|im_end|>"


def test_overlong_pairs_are_cut_dropped_or_an_error(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [
        ASKED,
        ASKED | {"rejected": "The answer is 46. " * 9},
        ASKED | {"prompt": "What is 12 + 34? " * 9},
        ASKED | {"chosen": "The answer is 46. " * 9 + "yes", "rejected": "The answer is 46. " * 9 + "no"},
    ]
    cut = pairs(tmp_path, tokenizer, *rows, max_len=50)
    assert len(cut.items) == 2
    assert (cut.report.truncated, cut.report.dropped_untrained, cut.report.dropped_equal) == (1, 1, 1)
    assert "1 dropped as equal within max_len" in cut.report.summary
    dropped = pairs(tmp_path, tokenizer, *rows, max_len=50, overlong="drop")
    assert (len(dropped.items), dropped.report.dropped_overlong) == (1, 3)
    with pytest.raises(UsageError, match=r"rows\.jsonl line 2: \d+ tokens are more than max_len 50"):
        pairs(tmp_path, tokenizer, *rows, max_len=50, overlong="error", invalid_rows="drop")


def test_nothing_left_is_an_error_that_says_why(tmp_path):
    with pytest.raises(UsageError, match=r"no pair remains for training: .*1 dropped with nothing to train on"):
        pairs(tmp_path, make_tokenizer(CHATML), ASKED, max_len=4)
    with pytest.raises(UsageError, match=r"no response remains for training: .*2 dropped"):
        labelled(tmp_path, make_tokenizer(CHATML), ASKED, max_len=4)


def test_sides_that_the_template_makes_equal_are_refused(tmp_path):
    row = {"prompt": "What?", "chosen": "Paris", "rejected": " Paris\n"}
    with pytest.raises(UsageError, match="line 1: chosen and rejected are equal tokens"):
        pairs(tmp_path, make_tokenizer(LLAMA_3), row)


def test_empty_prompt_is_refused(tmp_path):
    row = {"prompt": "", "chosen": "Paris", "rejected": "Rome"}
    with pytest.raises(UsageError, match="line 1: the prompt is empty"):
        pairs(tmp_path, make_tokenizer(None), row, apply_chat_template=False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"data_format": "preference", "label_key": "nope"}, "label_key 'nope' .* by data_format preference rows"),
        ({"data_format": "preference", "output_key": "nope"}, "output_key 'nope' names a column of unpaired rows"),
        ({"data_format": "unpaired", "rejected_key": "nope"}, "rejected_key 'nope' names a column of preference rows"),
        ({"label_key": "good", "chosen_key": "nope"}, "chosen_key 'nope' .* by label_key rows are read as unpaired"),
    ],
)
def test_columns_of_the_other_format_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        LabelledDataConfig(dataset="rows.jsonl", **settings)


def test_named_prompt_is_refused_where_the_sides_hold_it():
    with pytest.raises(
        ValidationError, match=r"input_key 'nope' names the prompt of .* rows are read as shared_prompt"
    ):
        PreferenceDataConfig(dataset="rows.jsonl", data_format="shared_prompt", input_key="nope")


def test_invalid_rows_are_dropped_and_counted_where_wanted(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [ASKED, ASKED | {"rejected": ASKED["chosen"]}, ASKED | {"chosen": None}, ASKED | {"prompt": "Why?"}]
    data = pairs(tmp_path, tokenizer, *rows, invalid_rows="drop")
    assert (len(data.items), data.report.rows, data.report.dropped_invalid) == (2, 4, 2)
    assert "2 dropped as invalid" in data.report.summary
    with pytest.raises(UsageError, match="line 2: chosen and rejected are equal"):
        pairs(tmp_path, tokenizer, *rows)


def test_faults_are_told_in_the_order_of_the_rows_whenever_they_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BATCH_ROWS", 2)
    tokenizer = make_tokenizer(LLAMA_3)
    same_tokens = {"prompt": "What?", "chosen": "Paris", "rejected": " Paris\n"}  # detected after tokenisation
    rows = [ASKED, same_tokens, ASKED, ASKED | {"chosen": None}, ASKED | {"rejected": None}, same_tokens, ASKED]
    with pytest.raises(UsageError, match="line 2: chosen and rejected are equal tokens"):
        pairs(tmp_path, tokenizer, *rows)
    noted = pairs(tmp_path, tokenizer, *rows, invalid_rows="drop").report.noted["dropped_invalid"]
    assert [int(said.split("line ")[1].split(":")[0]) for said in noted] == [2, 4, 5, 6]


@pytest.mark.parametrize("name", TRAINABLE)
def test_labelled_response_is_trained_with_its_end_of_turn(name, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name])
    row = {"messages": dialogue("What?", "one", "Why?", "The answer is 46."), "label": True}
    (item,) = labelled(tmp_path, tokenizer, row).items
    assert trained(tokenizer, item.response) == OPENING.get(name, "") + "The answer is 46.<|im_end|>"
    assert tokenizer.decode(item.response.token_ids[-1:]) == "<|im_end|>"
    assert item.response.loss_mask.all()
    assert "Why?" in tokenizer.decode(item.prompt_ids)


def test_labelled_arrays_and_report_count_what_the_items_hold(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [{"prompt": "What?", "completion": f"{i} {i}", "label": i % 3 == 0} for i in range(30)]
    data = labelled(tmp_path, tokenizer, *rows)
    assert data.columns["desirable"].tolist() == [row["label"] for row in rows]
    assert [item.desirable for item in data.items] == data.columns["desirable"].tolist()
    assert data.columns["prompt_length"].tolist() == [item.prompt_ids.size for item in data.items]
    assert data.columns["response_length"].tolist() == [len(item.response) for item in data.items]
    assert data.columns["num_trained"].tolist() == [int(item.response.loss_mask.sum()) for item in data.items]
    assert data.report.tokens == (data.columns["prompt_length"] + data.columns["response_length"]).sum()
    assert "(unpaired: prompt -> completion, label label), 30 rows gave 30 responses" in data.report.summary
    assert "10 desirable" in data.report.summary


def test_pair_gives_a_desirable_and_an_undesirable_response(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    data = labelled(tmp_path, tokenizer, ASKED, ASKED | {"prompt": "Why?"})
    assert data.columns["desirable"].tolist() == [True, False, True, False]
    assert [trained(tokenizer, item.response) for item in data.items] == [
        "The answer is 46.<|im_end|>",
        "The answer is 12.<|im_end|>",
    ] * 2
    (pair, _) = pairs(tmp_path, tokenizer, ASKED, ASKED | {"prompt": "Why?"}).items
    assert data.items[0].prompt_ids.tolist() == data.items[1].prompt_ids.tolist() == pair.prompt_ids.tolist()
    assert "(preference: prompt -> chosen, rejected), 2 rows gave 4 responses" in data.report.summary


def test_one_side_of_a_pair_may_be_dropped_as_too_long(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    row = ASKED | {"rejected": "The answer is 46. " * 9}
    data = labelled(tmp_path, tokenizer, row, max_len=50, overlong="drop")
    assert data.columns["desirable"].tolist() == [True]
    assert data.report.dropped_overlong == 1
