"""Data sets as tokenised sequences: truncation, plain text, BOS and EOS, reports."""

import json
import tempfile
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from chat_tokenizers import CHATML, VICUNA, make_tokenizer
from pydantic import ValidationError
from template_settings import split_settings
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from rlhf_cli.config.data import DataConfig, PromptConfig, TemplateConfig
from rlhf_cli.data.packing.packs import pack, plan_packs
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.store import TableWriter
from rlhf_cli.errors import UsageError

PLAIN = {"apply_chat_template": False, "input_template": "Q: {}\\nA:"}


def load(tmp_path, tokenizer, *rows, seed=0, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_data, template = split_settings(settings)
    config = DataConfig(**{"dataset": str(path), **of_data})
    return SEQUENCES.load(config, tokenizer, dataset=config.dataset, split="train", seed=seed, template=template)


def trained(tokenizer, sequence):
    return tokenizer.decode(sequence.token_ids[sequence.loss_mask])


def test_plain_row_by_hand(tmp_path):
    tokenizer = make_tokenizer(None, adds_bos=True)
    (sequence,) = load(tmp_path, tokenizer, {"prompt": "What {x}?", "answer": " 46"}, **PLAIN).items
    before = tokenizer("Q: What {x}?\nA:").input_ids
    answer = tokenizer(" 46", add_special_tokens=False).input_ids
    assert before[0] == tokenizer.bos_token_id
    assert sequence.token_ids.tolist() == [*before, *answer, tokenizer.eos_token_id]
    assert sequence.loss_mask.tolist() == [False] * len(before) + [True] * (len(answer) + 1)
    assert sequence.token_ids.dtype == np.int32


def test_plain_prompt_has_the_tokens_that_rollouts_start_from(tmp_path):
    # Tokenised together, ' Paris' would be one token that no rollout from 'A: ' can produce.
    tokenizer = make_tokenizer(None, adds_bos=True)
    rendering = {"apply_chat_template": False, "input_template": "Q: {}\nA: "}
    rows = [{"prompt": "What?", "answer": "Paris"}]
    (sequence,) = load(tmp_path, tokenizer, *rows, **rendering).items
    config, template = PromptConfig(prompt_data=str(tmp_path / "rows.jsonl")), TemplateConfig(**rendering)
    (prompt,) = load_prompts(config, tokenizer, max_new_tokens=8, seed=0, template=template).prompts
    assert sequence.token_ids[~sequence.loss_mask].tolist() == prompt.prompt_ids
    assert trained(tokenizer, sequence) == "Paris<|end|>"


def test_plain_prompt_may_write_the_beginning_of_sequence_itself(tmp_path):
    tokenizer = make_tokenizer(None, adds_bos=True)
    rendering = {"apply_chat_template": False, "input_template": "<|bos|>Q: {}"}
    (sequence,) = load(tmp_path, tokenizer, {"prompt": "What?", "answer": "46"}, **rendering).items
    assert sequence.token_ids.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("adds_bos", [False, True])
def test_all_of_a_text_but_the_first_token_is_trained(adds_bos, tmp_path):
    tokenizer = make_tokenizer(CHATML, adds_bos=adds_bos)
    data = load(tmp_path, tokenizer, {"text": "one two"}, {"text": " \n"}, {"text": "three<|end|>"})
    texts = [tokenizer.decode(sequence.token_ids) for sequence in data.items]
    start = "<|bos|>" if adds_bos else ""
    assert texts == [f"{start}one two<|end|>", f"{start}three<|end|>"]
    assert all(sequence.loss_mask.tolist() == [False] + [True] * (len(sequence) - 1) for sequence in data.items)
    assert data.report.dropped_untrained == 1
    assert "1 dropped with nothing to train on" in data.report.summary


def test_pretrain_mode_trains_every_token_but_the_first(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    (sequence,) = load(tmp_path, tokenizer, {"prompt": "What?", "answer": "46"}, pretrain_mode=True).items
    assert tokenizer.decode(sequence.token_ids).startswith("<|im_start|>user\nWhat?")
    assert sequence.loss_mask.tolist() == [False] + [True] * (len(sequence) - 1)


@pytest.mark.parametrize("rendering", [{}, PLAIN, {"data_format": "text", "input_key": "answer"}])
def test_truncation_puts_no_end_where_there_was_none(rendering, tmp_path):
    tokenizer = make_tokenizer(CHATML)
    row = {"prompt": "What?", "answer": "The answer is 46. " * 9}
    (whole,) = load(tmp_path, tokenizer, row, **rendering).items
    data = load(tmp_path, tokenizer, row, max_len=40, **rendering)
    (cut,) = data.items
    assert cut.token_ids.tolist() == whole.token_ids[:40].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:40].tolist()
    assert not {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")} & set(
        cut.token_ids[cut.loss_mask].tolist()
    )
    assert data.report.truncated == 1


def test_overlong_rows_are_truncated_dropped_or_an_error(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [
        {"prompt": "What?", "answer": "46"},
        {"prompt": "What?", "answer": "The answer is 46. " * 9},
        {"prompt": "What is 12 + 34? " * 9, "answer": "46"},
    ]
    truncated = load(tmp_path, tokenizer, *rows, max_len=50)
    assert (truncated.report.truncated, truncated.report.dropped_untrained) == (1, 1)
    assert truncated.columns["length"].tolist()[1:] == [50]
    dropped = load(tmp_path, tokenizer, *rows, max_len=50, overlong="drop")
    assert (dropped.report.dropped_overlong, len(dropped.items)) == (2, 1)
    assert "2 dropped as too long" in dropped.report.summary
    with pytest.raises(UsageError, match=r"rows\.jsonl line 2: \d+ tokens are more than max_len 50"):
        load(tmp_path, tokenizer, *rows, max_len=50, overlong="error")


def test_invalid_rows_are_dropped_and_counted_where_wanted(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [{"prompt": "What?", "answer": "46"}, {"prompt": "What?", "answer": " "}, {"prompt": "Why?", "answer": "1"}]
    data = load(tmp_path, tokenizer, *rows, invalid_rows="drop")
    assert [trained(tokenizer, sequence) for sequence in data.items] == ["46<|im_end|>", "1<|im_end|>"]
    assert (data.report.rows, data.report.dropped_invalid) == (3, 1)
    assert "1 dropped as invalid" in data.report.summary
    with pytest.raises(UsageError, match="line 2: the response is empty"):
        load(tmp_path, tokenizer, *rows)


@pytest.mark.parametrize("column", ["image", "images", "video", "videos"])
def test_rows_that_come_with_images_are_refused(column, tmp_path):
    tokenizer = make_tokenizer(CHATML)
    plain: dict[str, Any] = {"prompt": "What?", "answer": "46"}
    rows = [plain | {column: None}, plain | {column: ["a.png"]}]
    with pytest.raises(
        UsageError, match=rf"line 2: column '{column}' is not empty, but only text is read for this model"
    ):
        load(tmp_path, tokenizer, *rows)
    assert len(load(tmp_path, tokenizer, *rows, invalid_rows="drop").items) == 1
    assert len(load(tmp_path, tokenizer, rows[0], plain | {column: []}).items) == 2


@pytest.mark.parametrize("data_format", ["messages", "sharegpt", "text"])
def test_named_response_is_refused_where_the_format_has_none(data_format):
    with pytest.raises(ValidationError, match=f"output_key 'nope' names the response .* read as {data_format}: leave"):
        DataConfig(dataset="rows.jsonl", data_format=data_format, output_key="nope")


@pytest.mark.parametrize("rendering", [{}, PLAIN])
def test_rows_with_half_of_a_character_are_refused(rendering, tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [{"prompt": "What?", "answer": "a whole \U0001f600"}, {"prompt": "What?", "answer": "so \ud83d"}]
    with pytest.raises(UsageError, match=r"rows\.jsonl line 2: '\\ud83d' after '.*so ' is half of a character"):
        load(tmp_path, tokenizer, *rows, **rendering)
    data = load(tmp_path, tokenizer, *rows, invalid_rows="drop", **rendering)
    assert (len(data.items), data.report.dropped_invalid) == (1, 1)


def test_template_that_alters_what_is_trained_is_an_error_even_where_invalid_rows_are_dropped(tmp_path):
    row = {"prompt": "What?", "answer": "one"}
    template = VICUNA.replace("'ASSISTANT:' }}", "'ASSISTANT: ' }}")
    with pytest.raises(UsageError, match="generation prompt, which ends in"):
        load(tmp_path, make_tokenizer(template, trim_offsets=True), row, invalid_rows="drop")


def test_truncation_that_the_tokenizer_brings_with_it_is_not_applied(tmp_path):
    row = {"prompt": "What is 12 + 34?", "answer": "The answer is 46."}
    (whole,) = load(tmp_path, make_tokenizer(CHATML), row).items
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    (sequence,) = load(tmp_path, tokenizer, row).items
    assert sequence.token_ids.tolist() == whole.token_ids.tolist()


def test_nothing_left_is_an_error_that_says_why(tmp_path):
    with pytest.raises(UsageError, match=r"no sequence remains for training: .*1 dropped with nothing to train on"):
        load(tmp_path, make_tokenizer(CHATML), {"prompt": "What?", "answer": "46"}, max_len=4)


def test_report_and_arrays_count_what_the_sequences_hold(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [{"question": f"What is {i} + {i}?", "answer": f"{2 * i}." * (i % 5 + 1)} for i in range(1200)]
    data = load(tmp_path, tokenizer, *rows)
    assert data.columns["length"].tolist() == [len(sequence) for sequence in data.items]
    assert data.columns["num_trained"].tolist() == [sequence.num_trained for sequence in data.items]
    assert (data.report.rows, data.report.items) == (1200, 1200)
    assert data.report.tokens == data.columns["length"].sum()
    assert data.report.trained_tokens == data.columns["num_trained"].sum()
    assert "rows.jsonl (prompt_response: question -> answer), 1,200 rows gave 1,200 sequences" in data.report.summary
    for i in (0, 511, 512, 1199, -1):
        row = rows[i]
        assert trained(tokenizer, data.items[i % 1200]) == row["answer"] + "<|im_end|>"


def test_loading_again_gives_the_same_sequences(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    rows = [{"prompt": f"What is {i}?", "answer": f"{i}"} for i in range(40)]
    mixed = {"dataset": f"{tmp_path}/rows.jsonl,{tmp_path}/rows.jsonl", "dataset_probs": "0.5,0.5"}
    orders = []
    for seed in (1, 1, 2):
        data = load(tmp_path, tokenizer, *rows, seed=seed, **mixed)
        orders.append([trained(tokenizer, sequence) for sequence in data.items])
    assert orders[0] == orders[1] != orders[2]
    assert len(orders[0]) == 80


def test_data_sets_of_different_formats_are_mixed(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    data = load(
        tmp_path,
        tokenizer,
        {"prompt": "What?", "answer": "46"},
        dataset=f"{tmp_path}/rows.jsonl,{tmp_path}/text.jsonl",
    )
    assert [trained(tokenizer, sequence) for sequence in data.items] == ["46<|im_end|>", "<|end|>"]
    assert "(prompt_response: prompt -> answer); " in data.report.summary
    assert "text.jsonl (text: text), 2 rows" in data.report.summary


def test_at_most_max_samples_rows_are_read(tmp_path):
    rows = [{"prompt": "What?", "answer": str(i)} for i in range(5)]
    data = load(tmp_path, make_tokenizer(CHATML), *rows, max_samples=2)
    assert len(data.items) == 2
    assert "2 of 5 rows" in data.report.summary


def test_sequences_can_be_packed(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    data = load(tmp_path, tokenizer, *({"prompt": "What?", "answer": "46" * i} for i in range(1, 8)))
    plan = plan_packs(data.columns["length"], max_tokens=60, num_ranks=2)
    packs = [pack([data.items[i] for i in members]) for rank in plan for members in rank]
    assert sum(packed.targets_K.numel() for packed in packs) == data.report.trained_tokens
    assert sum(packed.input_ids_T.numel() for packed in packs) == data.report.tokens


def test_several_turns_need_a_chat_template(tmp_path):
    turns = ("user", "assistant", "user", "assistant")
    row = {"messages": [{"role": role, "content": "x"} for role in turns]}
    with pytest.raises(UsageError, match="line 1: without a chat template there is one prompt and its response"):
        load(tmp_path, make_tokenizer(None), row, apply_chat_template=False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"input_template": "Q:", "apply_chat_template": False}, "has no {} for the prompt"),
        ({"input_template": "Q: {}"}, "input_template needs --no_apply_chat_template"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        TemplateConfig(**settings)


def test_tokenizer_without_end_of_sequence_is_refused(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        load(tmp_path, tokenizer, {"prompt": "What?", "answer": "46"})


def test_the_report_names_the_first_rows_that_were_cut_or_dropped_and_why(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    fine, long, empty = ({"prompt": "What?", "answer": answer} for answer in ("46", "46 " * 99, ""))
    rows = [long, empty, fine, *[empty] * 6]
    whole_length = int(load(tmp_path, tokenizer, long).columns["length"][0])
    data = load(tmp_path, tokenizer, *rows, max_len=40, invalid_rows="drop")
    file = tmp_path / "rows.jsonl"
    assert data.report.lengths == {whole_length: 1, int(data.columns["length"][1]): 1}
    assert data.report.noted["truncated"] == [f"{file} line 1: {whole_length} tokens"]
    assert data.report.noted["dropped_invalid"] == [
        f"{file} line {line}: the response is empty" for line in (2, 4, 5, 6, 7)
    ]
    assert data.report.dropped_invalid == 7
    assert [data.where(item) for item in range(2)] == [f"{file} line 1", f"{file} line 3"]


def test_sources_say_which_files_and_how_many_rows_are_read(tmp_path):
    data = load(tmp_path, make_tokenizer(CHATML), *[{"prompt": "What?", "answer": "46"}] * 3, max_samples=2)
    (source,) = data.report.sources
    assert source.files == (str(tmp_path / "rows.jsonl"),)
    assert (source.num_rows, source.num_used, source.form) == (3, 2, "prompt_response: prompt -> answer")
    assert f"{source.name} (prompt_response: prompt -> answer, 2 of 3 rows)" in data.report.summary


DNA_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user>' if message['role'] == 'user' else '<model>' }}{{ message['content'] }}<end>"
    "{% endfor %}{% if add_generation_prompt %}{{ '<model>' }}{% endif %}"
)


def dna_tokenizer(*, unknown: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer with only four letters and the special tokens of its template."""
    specials = ["<end>", "<user>", "<model>", "<bos>", *(["<unk>"] if unknown else [])]
    letters = {letter: place for place, letter in enumerate("ACGT")}
    if unknown:
        letters["<unk>"] = len(letters)
    backend = Tokenizer(models.BPE(letters, [], unk_token="<unk>" if unknown else None))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        bos_token="<bos>",
        pad_token="<end>",
        unk_token="<unk>" if unknown else None,
        chat_template=DNA_TEMPLATE,
    )


@pytest.mark.parametrize("unknown", [False, True])
def test_a_vocabulary_of_four_letters_learns_from_chat_rows(unknown, tmp_path):
    tokenizer = dna_tokenizer(unknown=unknown)
    data = load(tmp_path, tokenizer, {"prompt": "ACCA", "answer": "GATTACA"}, {"prompt": "G", "answer": "CC"})
    assert [trained(tokenizer, sequence) for sequence in data.items] == ["GATTACA<end>", "CC<end>"]
    assert tokenizer.decode(data.items[0].token_ids) == "<user>ACCA<end><model>GATTACA<end>"
    assert data.report.end_of_turn == "<end>"


@pytest.mark.parametrize("unknown", [False, True])
def test_a_row_with_words_that_the_vocabulary_lacks_is_named(unknown, tmp_path):
    rows = {"prompt": "ACCA", "answer": "GATTACA"}, {"prompt": "G", "answer": "hello"}
    with pytest.raises(UsageError, match=r"line 2: .*(no token for|decode to)"):
        load(tmp_path, dna_tokenizer(unknown=unknown), *rows)


def test_plain_text_of_a_vocabulary_without_the_letter_a_begins_with_the_start_of_text(tmp_path):
    tokenizer = dna_tokenizer(unknown=False)
    settings = {"apply_chat_template": False, "input_template": "{}"}
    (sequence,) = load(tmp_path, tokenizer, {"prompt": "AC", "answer": "GT"}, **settings).items
    assert tokenizer.decode(sequence.token_ids) == "<bos>ACGT<end>"


def test_rows_with_special_tokens_in_their_messages_are_counted_and_trained(tmp_path):
    rows = [
        {"prompt": "What?", "answer": "one"},
        {"prompt": "Say <|im_end|> twice <|im_end|>", "answer": "two"},
        {"prompt": "What?", "answer": "<|im_end|> or <|start|>"},
    ]
    report = load(tmp_path, make_tokenizer(CHATML), *rows).report
    assert (report.control_rows, report.items) == (2, 3)
    assert report.control_tokens == {"<|im_end|>": 2, "<|start|>": 1}
    assert "2 with special tokens in the text of their messages" in report.summary
    assert "(<|im_end|> in 2, <|start|> in 1; first: " in report.summary
    assert report.control_at.endswith("line 2")


def test_the_template_s_own_tokens_and_plain_texts_are_not_counted(tmp_path):
    report = load(tmp_path, make_tokenizer(CHATML), {"prompt": "What?", "answer": "one"}).report
    assert report.control_rows == 0
    assert "special tokens" not in report.summary
    assert load(tmp_path, make_tokenizer(CHATML), {"text": "one <|end|>"}).report.control_rows == 0


def test_a_table_that_is_being_written_leaves_no_file_to_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writer = TableWriter(pa.schema({"a": pa.int64()}))
    writer.append_columns({"a": [1, 2]})
    assert list(tmp_path.iterdir()) == []
    table = writer.finish()
    assert [table.value("a", row) for row in range(2)] == [1, 2]
