"""The benchmark scripts' own computations, checked by hand; their measuring parts run at toy size."""

import importlib
import json
import random
import re
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from test_docs_parse import check

from rlhf_cli.models.scratch import train_tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def load(name):
    return importlib.import_module(name)


def test_word_problems_end_with_the_number_they_ask_for():
    problem = load("common").word_problem(random.Random(3))
    steps, final = problem["answer"].rsplit("\n#### ", 1)
    for step in steps.splitlines():
        sum_, result = step[step.index("<<") + 2 : step.index(">>")].split("=")
        assert eval(sum_) == int(result)  # of our own making
    assert steps.splitlines()[-1].split(">>")[1].startswith(final)
    assert problem["question"].endswith("in the end?")


def test_phases_and_the_rest_add_up_to_the_whole_iteration():
    ppo = load("online")
    steps = [
        {
            "step": 1,
            "time/step": 10.0,
            "time/generate": 4.0,
            "time/forward": 1.0,
            "time/train": 3.0,
            "time/reward": 1.0,
        },
        {"step": 2, "time/step": 10.0, "time/generate": 5.0, "time/forward": 1.0, "time/train": 3.0},
    ]
    parts = ppo.shares(steps)
    assert parts == pytest.approx({"generate": 0.45, "forward": 0.1, "train": 0.3, "reward": 0.05, "rest": 0.1})
    assert ppo.overhead(parts) == pytest.approx(0.15)


def test_memory_that_grows_evenly_rises_by_what_it_grows_and_the_start_does_not_count():
    bench = load("online")
    memory = [10.0, 500.0] + [1000.0 + 0.5 * i for i in range(8)]
    assert bench.rise(memory) == pytest.approx(50.0)
    assert bench.fifths(memory)[:2] == [(1, 2, 255.0), (3, 4, 1000.25)]


def test_a_made_up_mistake_is_in_one_step_and_goes_on_to_the_final_number():
    common, rng = load("common"), random.Random(4)
    for problem in (common.word_problem(rng) for _ in range(20)):
        right, mistaken = problem["answer"].splitlines(), problem["mistaken"].splitlines()
        slips = [result_of(line) - eval(sum_of(line)) for line in mistaken[:-1]]
        assert sum(slip != 0 for slip in slips) == 1
        assert all(result_of(line) == eval(sum_of(line)) for line in right[:-1])
        assert mistaken[-1] == f"#### {result_of(mistaken[-2])}" != right[-1]


def sum_of(line):
    return line[line.index("<<") + 2 : line.index(">>")].split("=")[0]


def result_of(line):
    return int(line[line.index("<<") + 2 : line.index(">>")].split("=")[1])


def test_peak_memory_belongs_to_the_command_and_not_to_its_parent(tmp_path):
    held = bytearray(400 << 20)  # this process holds more than the command does
    command = [sys.executable, "-c", "import time; held = b'x' * (100 << 20); del held; time.sleep(0.5)"]
    peak = load("common").run_quietly(command, log=tmp_path / "log")
    assert len(held) >> 20 > 100 < peak < 200


def test_a_command_that_fails_ends_the_benchmark_with_what_it_said(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(SystemExit, match="ended with status 1:\nno such model"):
        load("common").run_quietly(command, log=tmp_path / "log")


def test_speed_leaves_out_the_first_steps():
    comparison = load("vs_trl")
    seconds, trained = [60.0, 9.0, 9.0, 2.0, 3.0], [100, 100, 100, 100, 150]
    result = comparison.Result(seconds, trained, curve=[1.0] * 5, peak_memory=1.0)
    assert comparison.TOKENS.speed(result) == 50.0
    assert comparison.Measure("trained samples", "reward", warm_up_steps=2).speed(result) == 25.0


def runs(*speeds, curve=(3.0, 2.0, 1.5, 1.25), memory=700.0):
    return [load("vs_trl").Result([1.0] * 4, [speed] * 4, list(curve), memory) for speed in speeds]


def test_ratios_are_to_the_fastest_setting_of_the_peer_in_the_same_round():
    comparison = load("vs_trl")
    results = {"rlhf bf16": runs(300, 440, memory=500.0), "TRL fp32": runs(50, 60), "TRL bf16": runs(100, 110)}
    text = comparison.report(results, compared={"rlhf bf16": "TRL fp32", "rlhf fp32": "TRL fp32"})
    assert "| rlhf bf16 | 3.50 | 3.00-4.00 | 370 | 500 | 1.250 |" in text
    assert "ratio to TRL bf16" in text
    assert text.endswith("Loss of rlhf bf16 against TRL fp32: 0.0000 apart on average, 0.0000 at most")


def test_rewards_of_online_methods_are_reported_by_step():
    comparison = load("vs_trl")
    results = {
        "rlhf fp32": runs(64, 64, curve=(0.1, 0.2, 0.5)),
        "TRL fp32": runs(16, curve=(0.1, 0.25, 0.5)) + runs(16, curve=(0.3, 0.25, 0.5)),
    }
    lines = comparison.report(results, measure=comparison.SAMPLES).splitlines()
    assert "| rlhf fp32 | 4.00 | 4.00-4.00 | 64.00 | 700 | 0.500 |" in lines
    assert lines[-5] == "| step | rlhf fp32 | TRL fp32 |"
    assert lines[-3:-1] == ["| 1 | 0.100 | 0.200 |", "| 2 | 0.200 | 0.250 |"]


def test_variants_take_turns(capsys):
    comparison, order = load("vs_trl"), []

    def run(name):
        order.append(name)
        return comparison.Result([1.0] * 4, [5.0] * 4, [1.0] * 4, 10.0)

    results = comparison.in_turns(run, ["rlhf", "TRL"], runs=2)
    assert order == ["rlhf", "TRL", "rlhf", "TRL"]
    assert [len(found) for found in results.values()] == [2, 2]
    assert capsys.readouterr().out.splitlines()[0].endswith("    5.00 trained tokens/s,     10 MiB, loss 1.000")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sft grpo --steps 3", "more than the 3 warm-up steps"),
        ("episodes --batch_size 60", "must be a multiple of 8"),
        ("grpo --batch_size 16 --trl_micro_batch 3", "must be a multiple of 8 and of --trl_micro_batch"),
    ],
)
def test_steps_and_batches_that_a_method_cannot_train_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        load("vs_trl").parse(words.split())
    assert message in capsys.readouterr().err


def test_flags_of_all_variants_are_flags_of_their_commands(tmp_path, monkeypatch):
    comparison, lines = load("vs_trl"), []
    monkeypatch.setattr(comparison, "run_quietly", lambda line, **_: lines.append([str(word) for word in line[3:]]))
    monkeypatch.setattr(comparison, "read_metrics", lambda _: [])
    for name, method in comparison.METHODS.items():
        setting = comparison.Setting(name, tmp_path, tmp_path, tmp_path, tmp_path, 2, 16, 8, 1e-3)
        for variant in method.rlhf:
            with suppress(ValueError):  # an online run without metrics has no memory
                comparison.run(setting, variant)
    assert len(lines) == sum(len(method.rlhf) for method in comparison.METHODS.values())
    for line in lines:
        check(line)


def test_both_programs_are_rewarded_alike():
    reward = load("trl_task")
    assert reward.reward_func(["1 + 1? It is 2", "1 + 1? "], ["1 + 1? "] * 2, [None, None]) == [2 / 7, 0.0]
    assert reward.trl_reward(["It is 2", ""], prompts=["1 + 1? "] * 2) == [2 / 7, 0.0]


def test_grpo_gets_the_prompts_of_every_step_in_the_order_of_rlhf(tmp_path, monkeypatch):
    from rlhf_cli.config.train import BatchConfig
    from rlhf_cli.data.sampling import StepBatches

    data = load("vs_trl_data")
    rows = load("common").write_word_problems(tmp_path / "rows.jsonl", num_rows=5)
    problems = [json.loads(line)["question"] for line in rows.read_text().splitlines()]
    tokenizer = train_tokenizer(problems, vocab_size=400)
    monkeypatch.setattr(data, "load_tokenizer", lambda _: tokenizer)
    path = data.in_step_order(
        tmp_path / "prompts.jsonl", data.grpo_rows(tmp_path, rows, responses=8), rows_per_step=2, steps=2
    )
    written = [json.loads(line) for line in path.read_text().splitlines()]
    order = StepBatches(5, batch_size=2, epochs=1, seed=BatchConfig().seed)
    taken = [problems[int(number)] for step in order[:2] for number in step]
    assert all(problem in row["prompt"] for problem, row in zip(taken, written[:4], strict=True))


def test_both_programs_get_the_pairs_of_every_step_in_the_same_order(tmp_path, monkeypatch):
    from chat_tokenizers import GENERATION, make_tokenizer

    tokenizer = make_tokenizer(GENERATION)
    monkeypatch.setattr(load("vs_trl_data"), "load_tokenizer", lambda _: tokenizer)
    methods = {name: rows_of_steps(name, tmp_path) for name in ("dpo", "rm", "kto")}
    for step in range(2):
        pairs, whole, responses = (methods[name][step] for name in ("dpo", "rm", "kto"))
        assert len(pairs) == len(whole) == 3
        assert len(responses) == 6
        for pair, both in zip(pairs, whole, strict=True):
            assert both["chosen_ids"] == pair["prompt_ids"] + pair["chosen_ids"]
            assert both["rejected_ids"] == pair["prompt_ids"] + pair["rejected_ids"]
            assert both["trained"] == len(pair["chosen_ids"]) + len(pair["rejected_ids"])
    sides = {name: sorted(tokens_of(methods[name])) for name in ("dpo", "kto")}
    assert sides["dpo"] == sides["kto"]


def rows_of_steps(name, folder):
    """The rows that TRL would get for both steps of three pairs."""
    data, method = load("vs_trl_data"), load("vs_trl").METHODS[name]
    pairs = data.write_rows(folder / "pairs.jsonl", data.sample_pairs(data.synthetic_pairs(6), 6))
    size = 3 * method.rows_of_unit
    path = data.in_step_order(folder / f"{name}.jsonl", method.rows(folder, pairs), rows_per_step=size, steps=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [rows[:size], rows[size:]]


def tokens_of(steps):
    for row in (row for rows in steps for row in rows):
        for name in ("chosen_ids", "rejected_ids", "completion_ids"):
            if name in row:
                yield row["prompt_ids"] + row[name]


def test_marked_solutions_are_read_as_pairs(tmp_path):
    row = {
        "question": "1 + 1?",
        "ground_truth": "A: 2",
        "first": {"solution": "A: 2", "is_correct": True},
        "second": {"solution": "A: 3", "is_correct": False},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    pair = {"prompt": "1 + 1?", "chosen": "#### 2", "rejected": "#### 3"}
    assert load("vs_trl_data").read_pairs(tmp_path / "rows.jsonl") == [pair]
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    assert load("vs_trl_data").read_pairs(tmp_path / "pairs.jsonl") == [pair]


def test_padded_batches_keep_every_sequence_within_the_bound():
    gpu = load("gpu")
    lengths = [5, 90, 10, 40, 41, 3, 100]
    sequences = [gpu.TokenSequence(np.full(n, n, np.int32), np.arange(n) >= 1) for n in lengths]
    batches = gpu.padded_batches(sequences, max_tokens=120, by_length=True)
    assert [[len(s) for s in batch] for batch in batches] == [[3, 5, 10], [40, 41], [90], [100]]
    batches = gpu.padded_batches(sequences, max_tokens=200, by_length=False)
    assert [[len(s) for s in batch] for batch in batches] == [[5, 90], [10, 40, 41, 3], [100]]


def test_flops_of_a_small_shape_worked_out_by_hand():
    gpu = load("gpu")
    config = gpu.Qwen2Config(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=10,
    )
    # A layer has 64 + 64 (query, output) + 32 + 32 (key, value) + 3 * 128 (MLP) = 576 weights.
    layers, head, attention = 6 * 2 * 576 * 7, 6 * 8 * 10 * 5, 6 * 2 * 8 * (3**2 + 4**2)
    assert gpu.training_flops(config, [3, 4], num_trained=5) == layers + head + attention


def test_peaks_are_found_by_the_name_of_the_gpu():
    gpu = load("gpu")
    assert gpu.peak_tflops("NVIDIA H200") == 989
    assert gpu.peak_tflops("NVIDIA H100 PCIe") == 756
    assert gpu.peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert gpu.peak_tflops("Unknown") is None


def test_packing_and_logits_are_measured_at_toy_size():
    import torch

    gpu = load("gpu")
    scale = gpu.Scale("tiny", torch.device("cpu"), num_sequences=3, max_tokens=256, max_length=64, repeats=1)
    rows = list(gpu.rows_of(("packing", "logits"), scale, None))
    assert [row.setting for row in rows] == [
        "packed, varlen",
        "padded by length, sdpa",
        "padded in order, sdpa",
        "chunked, 256 x 512",
        "whole logits, 256 x 512",
    ]
    assert all(value > 0 for row in rows for value in row.figures.values())
    assert gpu.figures_table(rows).splitlines()[2].startswith("| packing | packed, varlen | ")


def test_packed_and_padded_losses_of_the_gpu_benchmark_agree():
    import torch

    parts = load("gpu")
    scale = parts.Scale("tiny", torch.device("cpu"), num_sequences=3, max_tokens=256, max_length=64)
    sequences = parts.make_sequences(scale)
    model = parts.make_model(scale, "varlen").float()
    packed = sum(-parts.PolicyModel(model)(batch)[0].sum() for batch in parts.make_packs(scale, sequences))
    model.set_attn_implementation("sdpa")
    padded = sum(
        model(**parts.padded_tensors(batch, scale.device), num_items_in_batch=1).loss
        for batch in parts.padded_batches(sequences, max_tokens=256, by_length=False)
    )
    assert packed.item() == pytest.approx(padded.item(), rel=1e-4)


def test_without_a_gpu_the_gpu_benchmark_says_so_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert load("gpu").main() == 2
    printed = capsys.readouterr()
    assert printed.err.strip() == "No NVIDIA GPU is visible to PyTorch here, so there is nothing to measure."
    assert printed.out == ""


def test_photos_are_files_much_smaller_than_their_pixels(tmp_path):
    memory = load("online")
    rows = [json.loads(line) for line in memory.write_photos(tmp_path, 2).read_text().splitlines()]
    files = [tmp_path / row["images"][0] for row in rows]
    assert len({file.read_bytes() for file in files}) == 2
    assert all(4 * file.stat().st_size < 1008 * 756 * 3 for file in files)
    assert all(row["prompt"].startswith("<image>") for row in rows)


def test_a_demonstration_of_the_trail_follows_it_to_the_end():
    trail = load("trl_task")
    *messages, last = load("vs_trl_data").demonstration(random.Random(0), [])["messages"]
    calls = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    places = [call["arguments"]["place"] for call in calls]
    player = trail.Trail()
    player.reset(places[0])
    found = [message["content"] for message in messages if message["role"] == "tool"]
    assert [player.look(place) for place in places] == found
    assert player.get_reward() == 1.0
    assert last["content"] == f"The {trail.next_place(places[-1])}."


def test_every_benchmark_on_a_page_exists_and_every_benchmark_is_on_a_page():
    pages = "".join(path.read_text() for path in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
    named = set(re.findall(r"(?<!:)benchmarks/(\w+\.py)", pages))  # COMMIT:benchmarks/NAME.py was removed since
    programs = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert programs - {"gpu_check.py", "trl_run.py"} <= named <= programs
