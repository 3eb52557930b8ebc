"""What the benchmark scripts compute themselves, checked by hand; their measuring parts run at toy size."""

import importlib
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


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


def test_speed_leaves_out_the_first_steps():
    result = load("sft_vs_trl").Result(
        seconds=[60.0, 9.0, 9.0, 2.0, 3.0], tokens=[100, 100, 100, 100, 150], loss=[1.0] * 5
    )
    assert result.speed == 50.0


def test_ratios_are_to_the_fastest_setting_of_the_peer_in_the_same_round():
    comparison = load("sft_vs_trl")

    def runs(*speeds):
        return [comparison.Result([1.0] * 4, [speed] * 4, [3.0, 2.0, 1.5, 1.25]) for speed in speeds]

    text = comparison.report({"rlhf bf16": runs(300, 440), "TRL fp32": runs(50, 60), "TRL bf16": runs(100, 110)})
    assert "| rlhf bf16 | 3.50 | 3.00-4.00 | 370 | 1.250 |" in text
    assert "ratio to TRL bf16" in text
    assert "Loss of rlhf bf16 against TRL fp32: 0.0000 apart on average, 0.0000 at most" in text


def test_both_ways_of_the_data_benchmark_make_the_same_tokens(tmp_path):
    from chat_tokenizers import GENERATION, make_tokenizer

    data, setting = load("data_speed"), load("setting")
    rows = setting.write_word_problems(tmp_path / "rows.jsonl", num_rows=20)
    ways = data.one_round(data.Setting(rows, make_tokenizer(GENERATION), tmp_path / "cache"))
    assert list(ways) == ["rlhf", "rlhf, cached", "datasets.map"]
    assert (tmp_path / "cache" / "rlhf").is_dir()


def test_padded_batches_keep_every_sequence_within_the_bound():
    gpu = load("gpu_training")
    lengths = [5, 90, 10, 40, 41, 3, 100]
    sequences = [gpu.Tokens(np.full(n, n, np.int32), np.arange(n) >= 1) for n in lengths]
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


def test_without_a_gpu_the_gpu_benchmark_says_so_in_one_sentence():
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "No NVIDIA GPU is visible to PyTorch here, so there is nothing to measure."
    assert done.stdout == ""
