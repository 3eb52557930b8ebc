"""`rlhf data` shows the items of a training command as text with marks and counts."""

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, make_tokenizer
from rich.console import Console

from rlhf_cli import cli
from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.commands.kto import KTOConfig
from rlhf_cli.commands.ppo import PPOConfig
from rlhf_cli.commands.prm import PRMConfig
from rlhf_cli.commands.rm import RMConfig
from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.config.data import (
    DEFAULT_TEMPLATE,
    DataConfig,
    LabelledDataConfig,
    PreferenceDataConfig,
    PromptConfig,
    TemplateConfig,
)
from rlhf_cli.config.inspection import ShowConfig, ShownDataConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.preference_data import PAIRS, RESPONSES
from rlhf_cli.data.preview import HEAD_TOKENS, TAIL_TOKENS, Bin, Piece, length_bins, part_of, quantile, spread
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.data_preview import inspect_data
from rlhf_cli.runs.data_settings import DATA_CONFIGS, PROMPT_NAMES, settings_of
from rlhf_cli.runs.data_view import show, visible

ASKED = [{"prompt": f"What is {i}?", "answer": f"It is {i}."} for i in range(9)]
PAIR_ROWS = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "I do not know."} for i in range(9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Return a folder with a tokenizer and invalid weights."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(CHATML).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # short names that are the same in every run

    def write(rows, name="rows.jsonl") -> str:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    return write


def config_of(command: str, dataset: str, model: str, **settings) -> DataCommandConfig:
    return build_config(DataCommandConfig, {"for": command, "dataset": dataset, "pretrain": model, **settings})


def preview(command: str, dataset: str, model: str, **settings):
    (made,) = inspect_data(config_of(command, dataset, model, **settings))
    return made


def page(command: str, dataset: str, model: str, *, terminal: int | None = None, **settings) -> str:
    """Return the printed text; `terminal` is the number of columns of a terminal."""
    stream = io.StringIO()
    plain = Console(file=stream)
    console = Console(file=stream, force_terminal=True, color_system="256", width=terminal) if terminal else plain
    show(inspect_data(config_of(command, dataset, model, **settings)), console, command=command)
    return stream.getvalue()


def marked(text: str) -> list[str]:
    """Return the text between the marks of trained tokens, without that in the legend."""
    return re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)[1:]


def trained(example) -> list[str]:
    return ["".join(piece.text for piece in part.pieces if piece.is_trained) for part in example.parts]


def test_examples_of_sft_mark_what_the_assistant_says_and_no_more(write, model):
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(["a?", "b", "c?", "d"])]
    text = page("sft", write([{"messages": talk}]), model)
    assert marked(text) == ["b<|im_end|>", "d<|im_end|>"]
    assert (
        "    <|im_start|>user\n    a?<|im_end|>\n    <|im_start|>assistant\n    [[b<|im_end|>]]\n"
        "    <|im_start|>user\n    c?<|im_end|>\n    <|im_start|>assistant\n    [[d<|im_end|>]]\n"
    ) in text


@pytest.mark.parametrize("command", ["rm", "dpo"])
def test_pairs_show_their_prompt_once_and_both_sides(write, model, command):
    made = preview(command, write(PAIR_ROWS), model)
    assert [example.where for example in made.examples] == [f"rows.jsonl line {line}" for line in (1, 5, 9)]
    for i, example in zip((0, 4, 8), made.examples, strict=True):
        assert [part.name for part in example.parts] == ["prompt", "chosen", "rejected"]
        assert trained(example) == ["", f"It is {i}.<|im_end|>", "I do not know.<|im_end|>"]
        prompt = f"<|im_start|>user\nWhat is {i}?<|im_end|>\n<|im_start|>assistant\n"
        assert "".join(piece.text for piece in example.parts[0].pieces) == prompt


@pytest.mark.parametrize(
    ("command", "rows", "most"),
    [
        (
            "sft",
            [{"prompt": "What?", "response": "x " * n} for n in (1, 9)],
            lambda data: int(data.columns["length"].max()),
        ),
        (
            "dpo",
            [{"prompt": "What? " * n, "chosen": "x " * n, "rejected": "y"} for n in (1, 9)],
            lambda data: int(
                (data.columns["prompt_length"] + data.columns["chosen_length"] + data.columns["rejected_length"]).max()
            ),
        ),
        (
            "kto",
            [{"prompt": "What? " * n, "response": "x " * (10 - n), "label": n > 1} for n in (1, 9)],
            lambda data: int(
                data.columns["prompt_length"].max() + data.columns["response_length"].max()
            ),  # of the other prompt
        ),
    ],
)
def test_the_longest_item_stands_beside_the_room_of_ranks_that_share_it(write, model, command, rows, most):
    loads: dict[str, tuple[Any, Any]] = {
        "sft": (DataConfig, SEQUENCES.load),
        "dpo": (PreferenceDataConfig, PAIRS.load),
        "kto": (LabelledDataConfig, RESPONSES.load),
    }
    (cls, load), file = loads[command], write(rows)
    expected = most(load(cls(dataset=file), make_tokenizer(CHATML), dataset=file, split="train", seed=42))
    made = preview(command, file, model, train_max_tokens_per_gpu=8, sequence_parallel_size=2)
    assert (made.most_tokens, made.room) == (expected, 16)
    text = " ".join(page(command, file, model, train_max_tokens_per_gpu=8, sequence_parallel_size=2).split())
    held = f"uses {expected} tokens; a micro-batch fits 16 (train_max_tokens_per_gpu 8 on 2 ranks)"
    assert f"{held}, TOO LARGE TO TRAIN: raise sequence_parallel_size or" in text
    wide = " ".join(page(command, file, model, train_max_tokens_per_gpu=expected).split())
    assert f"micro-batch fits {expected} (train_max_tokens_per_gpu {expected})" in wide
    assert "TOO LARGE" not in wide


def test_prompts_may_be_as_long_with_their_responses_as_max_len(write, model):
    file = write([{"question": "What?", "answer": "1"}])
    settings = {"max_len": 4096, "max_new_tokens": 16, "train_max_tokens_per_gpu": 1024}
    text = " ".join(page("ppo", file, model, **settings, sequence_parallel_size=4).split())
    assert "a prompt with response uses up to 4,096 tokens (max_len); a micro-batch fits 4,096" in text


def test_labelled_responses_show_their_label(write, model):
    rows = [{"prompt": "What?", "response": text, "label": text == "good"} for text in ("good", "bad")]
    text = page("kto", write(rows), model)
    assert marked(text) == ["good<|im_end|>", "bad<|im_end|>"]
    assert text.index("  desirable response: ") < text.index("[[good") < text.index("  undesirable response: ")


@pytest.mark.parametrize("command", ["grpo", "gkd"])
def test_prompts_of_other_online_commands_are_read_as_those_of_ppo(write, model, command):
    rows = write([{"question": "What?", "answer": "4"}])
    assert preview(command, rows, model) == preview("ppo", rows, model)
    assert f"Prompts as rlhf {command} reads them" in page(command, rows, model)


def test_prompts_show_their_ground_truth_and_what_leaves_no_room(write, model):
    rows = [{"question": "What? " * n, "answer": str(n)} for n in (1, 2, 40)]
    made = preview("ppo", write(rows), model, max_len=64, max_new_tokens=16)
    data = load_prompts(
        PromptConfig(prompt_data="rows.jsonl", max_len=64), make_tokenizer(CHATML), max_new_tokens=16, seed=42
    )
    assert (made.num_items, made.limit) == (len(data.prompts), 48) == (2, 48)
    assert [example.facts for example in made.examples] == [{"ground truth": "1"}, {"ground truth": "2"}]
    (dropped,) = [happened for happened in made.happened if happened.rows]
    assert (dropped.count, dropped.what) == (1, "dropped as too long")
    assert dropped.rows == [f"rows.jsonl line 3: {max(made.lengths)} tokens"]
    text = page("ppo", "rows.jsonl", model, max_len=64, max_new_tokens=16)
    assert "--- max_len 64 minus max_new_tokens 16: 1 is longer ---" in text
    assert "[[" not in text


@pytest.mark.parametrize(
    ("command", "cls", "load"),
    [
        ("sft", DataConfig, SEQUENCES.load),
        ("dpo", PreferenceDataConfig, PAIRS.load),
        ("kto", LabelledDataConfig, RESPONSES.load),
    ],
)
@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_counts_are_those_of_the_training_commands_report(write, model, command, cls, load, overlong):
    rows = [dict(row) for row in (ASKED if command == "sft" else PAIR_ROWS)]
    for row, key in ((rows[2], "answer" if command == "sft" else "chosen"), (rows[4], "prompt")):
        row[key] *= 30
    rows[6] = {"prompt": "?"}
    settings = {"max_len": 60, "overlong": overlong, "invalid_rows": "drop"}
    made = preview(command, write(rows), model, **settings)
    report = load(
        cls(dataset="rows.jsonl", **settings), make_tokenizer(CHATML), dataset="rows.jsonl", split="train", seed=42
    ).report
    assert (made.num_rows, made.num_items, made.num_tokens, made.num_trained, made.lengths) == (
        report.rows,
        report.items,
        report.tokens,
        report.trained_tokens,
        report.lengths,
    )
    for happened in made.happened:
        assert f"{happened.count:,} {happened.what}" in report.summary
    named = {happened.what: happened.rows for happened in made.happened}
    assert all("rows.jsonl line 7: " in row for row in named["dropped as invalid"])
    cut = "truncated" if overlong == "truncate" else "dropped as too long"
    assert re.fullmatch(r"rows\.jsonl line 3: \d+ tokens", named[cut][0])


def test_plain_output_is_the_same_every_time_within_80_columns_and_without_escapes(write, model):
    rows = [*ASKED, {"prompt": "long", "answer": "word " * 500}, {"prompt": "none", "answer": ""}]
    write(rows)
    text = page("sft", "rows.jsonl", model, invalid_rows="drop", max_len=256)
    assert text == page("sft", "rows.jsonl", model, invalid_rows="drop", max_len=256)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert not re.search(r"[ \t]\n", text)
    assert re.search(r" \.\.\. \d+ tokens \.\.\. ", text)
    assert "    rows.jsonl line 11: the response is empty\n" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_underlines_what_is_trained(write, model, width):
    text = page("sft", write([{"prompt": "What?", "answer": "one " * 60}]), model, terminal=width)
    underlined = re.findall(r"\x1b\[([\d;]*)m([^\x1b]*)", text)
    assert "[[" not in text
    shown = "".join(words for codes, words in underlined if "4" in codes.split(";"))
    assert shown.replace("like this", "").startswith("one one")
    assert shown.endswith("<|im_end|>")
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= width


def test_texts_do_nothing_to_the_terminal(write, model):
    rows = [{"prompt": "[bold]\x1b[2J\x07", "answer": "\x1b]0;title\x07 [red]"}]
    text = page("sft", write(rows), model, terminal=80)
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert r"[bold]\x1b[2J\x07" in text
    assert visible("a\u202eb\té👩\u200d🚀\n") == "a\\u202eb\té👩\u200d🚀\n"


def test_evaluation_data_are_shown_too(write, model):
    write(ASKED)
    write(ASKED[:2], "held_out.jsonl")
    made = inspect_data(config_of("sft", "rows.jsonl", model, eval_dataset="held_out.jsonl"))
    assert [(part.title, part.num_items) for part in made] == [("Training data", 9), ("Evaluation data", 2)]


def test_solutions_are_shown_step_by_step_with_their_labels(write, model):
    write([{"prompt": "How many?", "completions": ["One.", "So two.", "Or 3."], "labels": [True, False, 0.25]}])
    (made,) = inspect_data(config_of("prm", "rows.jsonl", model, step_separator="\\n\\n"))
    parts = made.examples[0].parts
    assert [part.name for part in parts] == [
        "prompt",
        "step 1, right",
        "step 2, wrong",
        "step 3, right with probability 0.25",
    ]
    assert [part.num_trained for part in parts] == [0, 1, 1, 1]
    assert "".join(piece.text for piece in parts[1].pieces) == "One.\n\n"
    assert parts[3].pieces[-1] == Piece("<|im_end|>", True)


def test_the_settings_are_those_of_the_commands():
    """Each setting of the training commands exists here with the same default, and no others do."""
    configs: dict[str, Any] = {
        "sft": SFTConfig,
        "rm": RMConfig,
        "dpo": DPOConfig,
        "prm": PRMConfig,
        "kto": KTOConfig,
        "distill": DistillConfig,
        "ppo": PPOConfig,
    }
    names = {theirs: ours for ours, theirs in PROMPT_NAMES.items()}
    ours, used = ShownDataConfig.model_fields, {"max_new_tokens"}
    assert ours["max_new_tokens"].default == RolloutConfig.model_fields["max_new_tokens"].default
    for command, config in configs.items():
        cls = config.model_fields["prompts" if command == "ppo" else "data"].annotation
        assert cls is DATA_CONFIGS[command]
        for name, field in cls.model_fields.items():
            name = names.get(name, name)
            assert ours[name].default == field.default, f"{command} --{name}"
            used.add(name)
    assert used == ours.keys()
    assert ShowConfig.model_fields["seed"].default == BatchConfig.model_fields["seed"].default


def test_settings_of_other_commands_are_refused_by_name():
    given = build_config(
        DataCommandConfig,
        {"for": "dpo", "dataset": "d", "pretrain": "m", "output_key": "o", "pretrain_mode": True, "format_prompt": "f"},
    )
    with pytest.raises(UsageError, match=r"^--output_key, --pretrain_mode, --format_prompt: rlhf dpo has no such"):
        settings_of("dpo", given.data, given.template)
    with pytest.raises(UsageError, match=r"^--data_format text: must be auto, unpaired or preference, or "):
        settings_of("kto", ShownDataConfig(dataset="d", data_format="text"), DEFAULT_TEMPLATE)
    with pytest.raises(UsageError, match=r"^--data_format text: must be auto, explicit_prompt or shared_prompt, or "):
        settings_of("dpo", ShownDataConfig(dataset="d", data_format="text"), DEFAULT_TEMPLATE)
    assert settings_of(
        "ppo", ShownDataConfig(dataset="d", dataset_split="test"), TemplateConfig(format_prompt="f")
    ) == PromptConfig(prompt_data="d", prompt_split="test")


@pytest.mark.parametrize("data_format", ["auto", "explicit_prompt", "shared_prompt"])
def test_a_forced_format_of_pairs_is_shown_as_it_is_trained(write, model, data_format):
    write(PAIR_ROWS)
    config = PreferenceDataConfig(dataset="rows.jsonl", data_format=data_format)
    if data_format == "shared_prompt":
        with pytest.raises(
            UsageError, match=r"line 1: column 'chosen' holds no conversation with its prompt"
        ) as training:
            PAIRS.load(config, make_tokenizer(CHATML), dataset="rows.jsonl", split="train", seed=42)
        with pytest.raises(UsageError) as shown:
            preview("dpo", "rows.jsonl", model, data_format=data_format)
        assert str(shown.value) == str(training.value)
    else:
        assert preview("dpo", "rows.jsonl", model, data_format=data_format).num_items == len(PAIR_ROWS)


@pytest.mark.parametrize(("data_format", "question"), [("prompt", "text?"), ("messages", "message?")])
def test_a_forced_format_of_prompts_is_shown_as_it_is_read(write, model, data_format, question):
    write([{"prompt": "text?", "messages": [{"role": "user", "content": "message?"}]}])
    made = preview("ppo", "rows.jsonl", model, data_format=data_format)
    (prompt,) = load_prompts(
        PromptConfig(prompt_data="rows.jsonl", data_format=data_format),
        make_tokenizer(CHATML),
        max_new_tokens=16,
        seed=42,
    ).prompts
    shown = "".join(piece.text for piece in made.examples[0].parts[0].pieces)
    assert shown == prompt.text
    assert question in shown


@pytest.mark.parametrize("rows", [[{"prompt": "What?", "answer": ""}], [{"a": 1}], [*PAIR_ROWS[:1], {"prompt": "a"}]])
def test_data_that_training_refuses_are_refused_in_the_same_words(write, model, rows):
    write(rows)
    config = PreferenceDataConfig(dataset="rows.jsonl")
    with pytest.raises(UsageError) as training:
        PAIRS.load(config, make_tokenizer(CHATML), dataset="rows.jsonl", split="train", seed=42)
    with pytest.raises(UsageError) as shown:
        preview("dpo", "rows.jsonl", model)
    assert str(shown.value) == str(training.value)


def test_the_program_shows_data_and_writes_nothing(write, model, tmp_path, capfd):
    write([*ASKED, {"prompt": "none", "answer": ""}])
    before = sorted(tmp_path.rglob("*"))

    def run(*args):
        status = cli.main(["data", "rows.jsonl", "--for", "sft", "--pretrain", model, *args])
        return status, *capfd.readouterr()

    status, shown, errors = run("--invalid-rows", "drop", "--num_rows=1")
    assert (status, errors) == (0, "")
    assert shown.startswith("Training data as rlhf sft reads it\n  rows.jsonl\n    10 rows; prompt_response: ")
    assert marked(shown) == ["It is 0.<|im_end|>"]
    status, shown, errors = run()
    assert (status, shown) == (2, "")
    assert errors == (
        "rlhf data: rows.jsonl line 10: the response is empty; use --invalid_rows drop to skip such rows\n"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_long_stretches_lose_their_middle_and_say_how_many_tokens():
    ids = list(range(1000))
    part = part_of("all", ids, [place >= 10 for place in ids], lambda tokens: "".join(f"{t} " for t in tokens))
    head, tail = 10 + HEAD_TOKENS, 1000 - TAIL_TOKENS
    texts = ["".join(f"{t} " for t in range(start, stop)) for start, stop in ((0, 10), (10, head), (tail, 1000))]
    first, last = Piece(texts[1], True), Piece(texts[2], True)
    assert part.pieces == [Piece(texts[0], False), first, Piece("", True, tail - head), last]
    assert (part.num_tokens, part.num_trained) == (1000, 990)


def test_many_turns_lose_those_in_the_middle():
    part = part_of("all", list(range(40)), [place % 2 == 1 for place in range(40)], lambda tokens: "x" * len(tokens))
    assert len(part.pieces) == 11
    assert part.pieces[6] == Piece("", False, 30)
    assert sum(len(piece.text) + piece.num_left_out for piece in part.pieces) == 40
    assert part.num_trained == 20


def test_no_character_is_cut_in_two_where_the_middle_is_left_out():
    tokenizer = make_tokenizer(CHATML)
    ids = tokenizer("x" + "漢字" * 300).input_ids
    part = part_of("all", ids, [True] * len(ids), tokenizer.decode)
    assert "\ufffd" not in "".join(piece.text for piece in part.pieces)


def test_examples_are_spread_over_the_data():
    assert [spread(100, 3), spread(2, 3), spread(1, 3)] == [[0, 50, 99], [0, 1], [0]]
    assert [spread(5, 1), spread(5, 0)] == [[0], []]


def test_bins_cover_all_lengths_and_end_at_the_limit():
    lengths = {3: 2, 50: 10, 64: 1, 65: 4, 99: 1, 5000: 1}
    bins = length_bins(lengths, 64)
    assert sum(count for *_, count in bins) == sum(lengths.values())
    assert all(before.high + 1 == after.low for before, after in pairwise(bins))
    assert (bins[0].low, bins[-1].high) == (1, 5000)
    assert next(entry for entry in bins if entry.low <= 64 <= entry.high).high == 64
    assert length_bins({7: 3}, 100) == [Bin(7, 7, 3)]
    assert [quantile(lengths, share) for share in (0.0, 0.5, 1.0)] == [3, 50, 5000]
