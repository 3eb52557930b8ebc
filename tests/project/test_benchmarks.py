"""The benchmark scripts' own computations, checked by hand; their measuring parts run at toy size."""

import importlib
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhf_cli.models.scratch import train_tokenizer

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def load(name):
    return importlib.import_module(name)


def test_word_problems_end_with_the_number_they_ask_for():
    problem = load("setting").word_problem(random.Random(3))
    steps, final = problem["answer"].rsplit("\n#### ", 1)
    for step in steps.splitlines():
        sum_, result = step[step.index("<<") + 2 : step.index(">>")].split("=")
        assert eval(sum_) == int(result)  # of our own making
    assert steps.splitlines()[-1].split(">>")[1].startswith(final)
    assert problem["question"].endswith("in the end?")


def test_phases_and_the_rest_add_up_to_the_whole_iteration():
    ppo = load("ppo_phases")
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
    bench = load("memory_iterations")
    memory = [10.0, 500.0] + [1000.0 + 0.5 * i for i in range(8)]
    assert bench.rise(memory) == pytest.approx(50.0)
    assert bench.fifths(memory)[:2] == [(1, 2, 255.0), (3, 4, 1000.25)]
    assert "<svg" in bench.page(memory)


def test_a_made_up_mistake_is_in_one_step_and_goes_on_to_the_final_number():
    setting = load("setting")
    rng = random.Random(4)
    for problem in (setting.word_problem_pair(rng) for _ in range(20)):
        right, mistaken = problem["answer"].splitlines(), problem["mistaken"].splitlines()
        slips = [result_of(line) - eval(sum_of(line)) for line in mistaken[:-1]]
        assert sum(slip != 0 for slip in slips) == 1
        assert all(result_of(line) == eval(sum_of(line)) for line in right[:-1])
        assert mistaken[-1] == f"#### {result_of(mistaken[-2])}" != right[-1]


def sum_of(line):
    return line[line.index("<<") + 2 : line.index(">>")].split("=")[0]


def result_of(line):
    return int(line[line.index("<<") + 2 : line.index(">>")].split("=")[1])


def test_word_problems_are_the_same_with_and_without_a_mistaken_answer():
    setting = load("setting")
    alone, both = random.Random(5), random.Random(5)
    for _ in range(5):
        problem, pair = setting.word_problem(alone), setting.word_problem_pair(both)
        assert problem == {"question": pair["question"], "answer": pair["answer"]}


def test_peak_memory_is_that_of_the_command_and_not_of_who_starts_it(tmp_path):
    setting = load("setting")
    held = bytearray(400 << 20)  # this process holds more than the command does
    command = [sys.executable, "-c", "import time; held = b'x' * (100 << 20); del held; time.sleep(0.5)"]
    peak = setting.run_quietly(command, log=tmp_path / "log")
    assert len(held) >> 20 > 100 < peak < 200


def test_a_command_that_fails_ends_the_benchmark_with_what_it_said(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(SystemExit, match="ended with status 1:\nno such model"):
        load("setting").run_quietly(command, log=tmp_path / "log")


def test_speed_leaves_out_the_first_steps():
    comparison = load("comparison")
    seconds, trained = [60.0, 9.0, 9.0, 2.0, 3.0], [100, 100, 100, 100, 150]
    result = comparison.Result(seconds, trained, course=[1.0] * 5, peak_memory=1.0)
    assert comparison.TOKENS.speed(result) == 50.0
    assert comparison.Measure("trained samples", "reward", warm_up_steps=2).speed(result) == 25.0


def test_ratios_are_to_the_fastest_setting_of_the_peer_in_the_same_round():
    comparison = load("comparison")

    def runs(*speeds, memory=700.0):
        return [comparison.Result([1.0] * 4, [speed] * 4, [3.0, 2.0, 1.5, 1.25], memory) for speed in speeds]

    results = {"rlhf bf16": runs(300, 440, memory=500.0), "TRL fp32": runs(50, 60), "TRL bf16": runs(100, 110)}
    text = comparison.report(results, compared={"rlhf bf16": "TRL fp32", "rlhf fp32": "TRL fp32"})
    assert "| rlhf bf16 | 3.50 | 3.00-4.00 | 370 | 500 | 1.250 |" in text
    assert "ratio to TRL bf16" in text
    assert text.endswith("Loss of rlhf bf16 against TRL fp32: 0.0000 apart on average, 0.0000 at most")


def test_variants_take_turns(capsys):
    comparison = load("comparison")
    order = []

    def variant(setting, name):
        order.append(name)
        return comparison.Result([1.0] * 4, [5.0] * 4, [1.0] * 4 if name == "rlhf" else [], 10.0)

    results = comparison.in_turns(None, {"rlhf": variant, "part": variant}, runs=2)
    assert order == ["rlhf", "part", "rlhf", "part"]
    assert [len(found) for found in results.values()] == [2, 2]
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.endswith("    5.00 trained tokens/s,     10 MiB, loss 1.000")
    assert second.endswith("    5.00 trained tokens/s,     10 MiB")


def test_an_iteration_is_set_beside_the_sum_of_its_parts_and_rewards_beside_each_other():
    grpo, comparison = load("grpo_vs_trl"), load("comparison")

    def runs(second, *rewards):
        return [comparison.Result([90.0, second, second], [64] * 3, list(rewards), 1.0)]

    results = {
        "rlhf fp32": runs(6.0, 0.1, 0.2, 0.5) * 2,
        "generation alone fp32": runs(3.0) * 2,
        "training alone fp32": runs(2.0) * 2,
        "TRL fp32": runs(18.0, 0.1, 0.25, 0.5) + runs(18.0, 0.3, 0.25, 0.5),
    }
    assert "ratio to their sum 1.20 (aim 1.15)" in grpo.beside_parts(results, "fp32")
    assert grpo.beside_parts(results, "bf16") is None
    lines = grpo.courses(results).splitlines()
    assert lines[0] == "| step | rlhf fp32 | TRL fp32 |"
    assert lines[2:4] == ["| 1 | 0.100 | 0.200 |", "| 2 | 0.200 | 0.250 |"]
    table = comparison.report(results, measure=grpo.SAMPLES)
    assert "| rlhf fp32 | 3.00 | 3.00-3.00 | 10.67 | 1 | 0.500 |" in table
    assert "| training alone fp32 | 9.00 | 9.00-9.00 | 32.00 | 1 |  |" in table


def test_both_programs_are_rewarded_alike():
    reward = load("grpo_reward")
    assert reward.reward_func(["1 + 1? It is 2", "1 + 1? "], ["1 + 1? "] * 2, [None, None]) == [2 / 7, 0.0]
    assert reward.trl_reward(["It is 2", ""], prompts=["1 + 1? "] * 2) == [2 / 7, 0.0]


def test_grpo_gets_the_prompts_of_every_step_in_the_order_of_rlhf(tmp_path):
    from rlhf_cli.config.train import BatchConfig
    from rlhf_cli.data.sampling import StepBatches

    grpo, setting = load("grpo_vs_trl"), load("setting")
    rows = setting.write_word_problems(tmp_path / "rows.jsonl", num_rows=5)
    problems = [json.loads(line)["question"] for line in rows.read_text().splitlines()]
    tokenizer = train_tokenizer(problems, vocab_size=400)
    given = load("comparison").Setting(tmp_path, rows, tmp_path / "out", tmp_path, 2, 16, 8, 1e-3)
    grpo.write_rows(given, tokenizer)
    written = [json.loads(line) for line in given.tokenised.read_text().splitlines()]
    order = StepBatches(5, batch_size=2, epochs=1, seed=BatchConfig().seed)
    taken = [problems[int(number)] for step in order[:2] for number in step]
    assert all(problem in row["prompt"] for problem, row in zip(taken, written, strict=True))
    assert tokenizer(written[0]["prompt"])["input_ids"] == written[0]["prompt_ids"]


def test_the_driver_is_timed_at_toy_size_and_growth_is_a_power_of_the_samples(tmp_path):
    bench = load("controller_time")
    assert bench.growth({16: 5.0, 64: 1.0, 256: 4.0, 1024: 16.0}) == pytest.approx(1.0)
    assert bench.growth({16: 5.0, 64: 1.0, 256: 16.0, 1024: 256.0}) == pytest.approx(2.0)
    material = bench.Material(8)
    found = bench.iteration_seconds(material, num_samples=16, num_ranks=3, iterations=2)
    assert len(found) == 2
    assert min(found) > 0
    times = {ranks: {16: 0.002, 32: 0.004, 64: 0.008} for ranks in (1, 8)}
    assert "| 64 | 8.0 | 8.0 | 125 |" in bench.table(times)
    assert "| power of the samples | 1.00 | 1.00 | |" in bench.table(times)
    assert bench.page(times).count("<svg") == 1


def test_both_programs_get_the_pairs_of_every_step_in_the_same_order(tmp_path):
    comparison = load("preference_vs_trl")
    methods = {name: rows_of_steps(comparison, name, tmp_path) for name in comparison.METHODS}
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


def rows_of_steps(comparison, name, folder):
    """The rows that TRL would get for both steps of three pairs."""
    from chat_tokenizers import GENERATION, make_tokenizer

    method = comparison.METHODS[name]
    pairs = comparison.write_pairs(folder / "pairs.jsonl", comparison.made_up_pairs(6), 6)
    setting = comparison.Setting(folder, pairs, folder / f"{name}.jsonl", folder, 2, 3 * method.rows_of_pair, 1, 1e-4)
    comparison.write_tokenised(setting, method, make_tokenizer(GENERATION))
    rows = [json.loads(line) for line in setting.tokenised.read_text().splitlines()]
    return [rows[: setting.batch_size], rows[setting.batch_size :]]


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
    assert load("preference_vs_trl").read_pairs(tmp_path / "rows.jsonl") == [pair]
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    assert load("preference_vs_trl").read_pairs(tmp_path / "pairs.jsonl") == [pair]


def test_the_data_benchmark_refuses_ways_that_do_not_make_the_same_tokens(tmp_path, monkeypatch):
    from chat_tokenizers import GENERATION, make_tokenizer

    data = load("data_speed")
    make_tokenizer(GENERATION).save_pretrained(tmp_path / "model")
    rows = data.write_rows(tmp_path / "rows.jsonl", 20)
    setting = data.Setting(tmp_path, rows, str(tmp_path / "model"))
    monkeypatch.setattr(data, "by_trl", lambda setting, num_proc: data.by_rlhf(setting))
    assert set(data.one_round(setting)) == {"rlhf", "rlhf, cached", "TRL", f"TRL, {os.cpu_count()} processes"}
    assert (tmp_path / "cache" / "rlhf").is_dir()
    monkeypatch.setattr(data, "by_trl", lambda setting, num_proc: data.Prepared(1.0, tokens=7, trained=5))
    with pytest.raises(SystemExit, match="do not make the same tokens"):
        data.one_round(setting)


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_rows_of_the_scaling_benchmark_have_exactly_the_length_that_is_asked_for(tmp_path, command):
    from rlhf_cli.config.data import DataConfig, PreferenceDataConfig
    from rlhf_cli.data.preference_data import load_pairs
    from rlhf_cli.data.sft_data import load_sft_sequences

    scaling, rng = load("scaling"), random.Random(0)
    problems = (load("setting").word_problem(rng) for _ in range(300))
    tokenizer = train_tokenizer((text for problem in problems for text in problem.values()), vocab_size=2048)
    path = str(scaling.write_rows(tmp_path / "rows.jsonl", command, length=128, num_rows=3))
    if command == "sft":
        config = DataConfig(dataset=path, max_len=128)
        data = load_sft_sequences(config, tokenizer, dataset=path, split="train", seed=0)
        assert data.lengths.tolist() == [128] * 3
    else:
        pairs = load_pairs(
            PreferenceDataConfig(dataset=path, max_len=128), tokenizer, dataset=path, split="train", seed=0
        )
        assert (pairs.prompt_lengths + pairs.chosen_lengths).tolist() == [128] * 3
        assert (pairs.prompt_lengths + pairs.rejected_lengths).tolist() == [128] * 3


def test_scaling_is_told_by_the_time_of_a_token():
    scaling = load("scaling")
    points = [
        scaling.Point("dpo", length=128, rows=32, seconds=1.0, peak_memory=900.0),
        scaling.Point("dpo", length=2048, rows=2, seconds=1.5, peak_memory=1000.0),
    ]
    lines = scaling.table(points).splitlines()
    assert lines[2] == "| dpo | 128 | 32 | 8,192 | 1.00 | 122 | 1.00 | 900 |"
    assert lines[3] == "| dpo | 2,048 | 2 | 8,192 | 1.50 | 183 | 1.50 | 1,000 |"
    page = scaling.page([("Length", "length", points)])
    assert page.count("<svg") == 2
    assert page.count("<circle") == 4  # each point in both charts, and nothing that was not measured
    assert "| dpo | 2,048 | 2 |" in page


@pytest.mark.e2e  # two DeepSpeed processes, whose operator compiles on first use
def test_ranks_that_share_a_sequence_are_measured_at_toy_size():
    found = load("sequence_parallel").in_children("ulysses", 96)
    assert 0 < found.communication < found.seconds
    assert found.peak_bytes > 0


def test_ranks_that_share_a_sequence_stand_beside_ranks_with_one_each():
    bench = load("sequence_parallel")
    alone = bench.Figures(peak_bytes=400 << 20, seconds=2.0, communication=0.0)
    shared = bench.Figures(peak_bytes=200 << 20, seconds=1.25, communication=0.25)
    assert bench.line(1000, "alone", alone, alone) == "| 1,000 | alone | 1,000 | 1.00 | 400 | 1.00 | 0.0% |"
    assert bench.line(1000, "gather", shared, alone) == "| 1,000 | gather | 800 | 0.80 | 200 | 2.00 | 20.0% |"


def test_padded_batches_keep_every_sequence_within_the_bound():
    gpu = load("gpu_training")
    lengths = [5, 90, 10, 40, 41, 3, 100]
    sequences = [gpu.TokenSequence(np.full(n, n, np.int32), np.arange(n) >= 1) for n in lengths]
    batches = gpu.padded_batches(sequences, max_tokens=120, by_length=True)
    assert [[len(s) for s in batch] for batch in batches] == [[3, 5, 10], [40, 41], [90], [100]]
    batches = gpu.padded_batches(sequences, max_tokens=200, by_length=False)
    assert [[len(s) for s in batch] for batch in batches] == [[5, 90], [10, 40, 41, 3], [100]]


def test_flops_of_a_small_shape_worked_out_by_hand():
    gpu = load("gpu_training")
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

    gpu, parts = load("gpu"), load("gpu_training")
    scale = parts.Scale("tiny", torch.device("cpu"), num_sequences=3, max_tokens=256, max_length=64, repeats=1)
    rows = list(gpu.rows_of(("packing", "logits"), scale, None))
    assert [row.setting for row in rows] == [
        "packed, varlen",
        "padded by length, sdpa",
        "padded in order, sdpa",
        "chunked, 256 x 512",
        "whole logits, 256 x 512",
    ]
    assert all(value > 0 for row in rows for value in row.figures.values())
    assert gpu.table(rows).splitlines()[2].startswith("| packing | packed, varlen | ")


def test_packed_and_padded_losses_of_the_gpu_benchmark_agree():
    import torch

    parts = load("gpu_training")
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


def test_loading_a_checkpoint_is_timed_at_its_own_stage_and_at_another(tmp_path, group_of_one):
    bench = load("checkpoint_conversion")
    bench.save_model(tmp_path / "model", hidden=64, layers=1)
    rows = list(bench.measure(tmp_path / "model", tmp_path, [2, 0], repeats=1))
    assert [(row.saved, row.stage) for row in rows] == [(2, 2), (2, 0), (0, 2), (0, 0)]
    parameters = 4096 * 64 + 3 * 64 + 3 * 64 * 256 + (4 * 64 + 3) * 64  # embeddings, norms, MLP, attention with biases
    assert all(row.num_bytes == pytest.approx(14 * parameters, rel=0.05) for row in rows)
    assert all(row.seconds > 0 for row in rows)
    assert bench.Loaded(2, 3, 2_000_000_000, 3.0).row() == "| 2 | 3 | cut anew | 2.000 | 3.00 | 1.50 |"
    assert not (tmp_path / "stage2").exists()


def test_photos_are_files_much_smaller_than_their_pixels(tmp_path):
    memory = load("picture_memory")
    rows = [json.loads(line) for line in memory.write_photos(tmp_path, 2).read_text().splitlines()]
    files = [tmp_path / row["images"][0] for row in rows]
    assert len({file.read_bytes() for file in files}) == 2
    assert all(4 * file.stat().st_size < 1008 * 756 * 3 for file in files)
    assert all(row["prompt"].startswith("<image>") for row in rows)


def test_sampling_ahead_is_measured_by_the_waits_of_both_sides():
    bench = load("async_overlap")
    ways = [bench.Way(0), bench.Way(1), bench.Way(2, partial=True)]
    found = {way: bench.overlap(way, training=0.02, sampling=0.02, spread=0.0, iterations=3) for way in ways}
    assert found[ways[0]].seconds >= 0.04
    assert all(0 <= share <= 1 for one in found.values() for share in (one.actor_waited, one.engines_waited))
    table = bench.table(found | {ways[0]: bench.Overlap(0.04, 0.5, 0.5)})
    assert "| 0 | 25.00 | 1.00 | 50% | 50% |" in table
    assert "| 2, partial |" in table


def test_a_schedule_is_compared_with_the_tokens_alone_of_its_own_round():
    seconds = {"tokens alone": [2.0, 4.0], "step": [3.0, 5.0], "free": [2.0, 6.0]}
    assert load("episode_latency").ratios(seconds) == {"step": [1.5, 1.25], "free": [1.0, 1.5]}


def test_a_demonstration_of_the_trail_follows_it_to_the_end():
    trail = load("trail")
    *messages, last = load("episodes_vs_trl").demonstration(random.Random(0), [])["messages"]
    calls = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    places = [call["arguments"]["place"] for call in calls]
    player = trail.Trail()
    player.reset(places[0])
    found = [message["content"] for message in messages if message["role"] == "tool"]
    assert [player.look(place) for place in places] == found
    assert player.get_reward() == 1.0
    assert last["content"] == f"The {trail.next_place(places[-1])}."
