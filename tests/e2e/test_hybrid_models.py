"""End-to-end tests of models with convolutions, recurrent layers or an encoder that text does not use, in `rlhf sft`,
`rlhf dpo` and `rlhf grpo`.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from forked import run_rlhf
from picture_rows import write_rows
from safetensors.torch import load_file, save_file
from tiny_text_only import save_tiny_gemma3
from tiny_vision import save_tiny_vision
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rlhf_cli.models.weight_files import open_weights
from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SHARED = "--param_dtype fp32 --max_len 64 --train_batch_size 8 --learning_rate 1e-3"


def with_draft_head(model: str, folder: Path) -> Path:
    """Copy a model, with a weight for multi-token prediction, which transformers drops if the class is Qwen3.5's."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    if any("linear_attn" in name for name in weights):
        save_file(weights | {"mtp.fc.weight": torch.randn(3, 5)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    opened = open_weights(folder)
    return {name: opened.read(name) for name in opened.names()}


def slow(kind: str) -> object:
    return pytest.param(kind, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_a_hybrid_model_trains_on_rows_and_pairs(kind, tiny_hybrid_dir, problems, tmp_path):
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    examples, pairs = tmp_path / "examples.jsonl", tmp_path / "pairs.jsonl"
    examples.write_text("".join(json.dumps({"prompt": r["prompt"], "response": r["answer"]}) + "\n" for r in rows))
    chosen = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "no idea"} for r in rows]
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in chosen))
    source = with_draft_head(tiny_hybrid_dir(kind), tmp_path / "source")
    sft = f"sft --pretrain {source} --dataset {examples} {SHARED} --gradient_checkpointing"
    dpo = (
        f"dpo --pretrain {tmp_path / 'sft'} --dataset {pairs} {SHARED} --num_processes 2 --zero_stage 3 --save_steps 1"
    )
    dpo = dpo.replace("fp32", "bf16")
    for name, command in (("sft", sft), ("dpo", dpo)):
        run_rlhf(*command.split(), "--output", tmp_path / name)
    first = read_metrics(tmp_path / "dpo")[1]
    # Policy and reference are the same model, whatever the packs; both responses continue one prompt.
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["grad_norm"] > 0
    folders = [source, tmp_path / "sft" / "model", tmp_path / "dpo" / "model"]
    start, tuned, trained = map(weights_in, folders)
    assert start.keys() == tuned.keys() == trained.keys()
    mixers = [name for name in start if "conv" in name]
    assert mixers
    assert all(not start[name].equal(tuned[name]) and not tuned[name].equal(trained[name]) for name in mixers)
    in_float32 = {name for name, tensor in trained.items() if tensor.dtype == torch.float32}
    assert {name for name in start if name.endswith(("A_log", "dt_bias"))} <= in_float32
    checkpoint = max((tmp_path / "dpo" / "checkpoints").glob("step_*"))
    run_rlhf("merge", "--model", checkpoint, "--output", tmp_path / "merged")
    merged = weights_in(tmp_path / "merged")
    assert merged.keys() == trained.keys()
    assert all(merged[name].dtype == tensor.dtype and merged[name].equal(tensor) for name, tensor in trained.items())
    assert AutoModelForCausalLM.from_pretrained(folders[-1])(torch.arange(9)[None]).logits.isfinite().all()


VARIED = """
def reward_func(queries, prompts, labels):
    return [len(set(query[len(prompt):])) for query, prompt in zip(queries, prompts)]
"""


@pytest.mark.parametrize("kind", [slow("lfm2"), slow("qwen3_5_text"), "granitemoehybrid"])
def test_a_hybrid_model_is_pushed_to_the_engine_that_samples(kind, tiny_hybrid_dir, problems, reward_file, tmp_path):
    run_rlhf(
        *f"grpo --pretrain {tiny_hybrid_dir(kind)} --prompt_data {problems} --label_key answer --max_len 64".split(),
        *f"--param_dtype fp32 --reward_func {reward_file(VARIED)} --max_new_tokens 6 --rollout_batch_size 4".split(),
        *f"--n_samples_per_prompt 3 --train_batch_size 12 --max_iterations 2 --output {tmp_path / 'run'}".split(),
        *["--actor_learning_rate", "1e-2", *(["--rollout_routing_replay"] if kind == "granitemoehybrid" else [])],
    )
    metrics = read_metrics(tmp_path / "run")
    assert sorted(metrics) == [1, 2]
    assert all(found["grad_norm"] > 0 for found in metrics.values())
    # Log-probs of the engine and of packs with shared prompts agree, also after a push.
    assert [found["rollout_diff_max"] < 1e-4 for found in metrics.values()] == [True, True]


@pytest.mark.slow
def test_a_hybrid_model_with_images_trains_on_pairs_and_on_its_own_responses(reward_file, tmp_path):
    model = save_tiny_vision("qwen3_5", tmp_path / "model")
    images = [["a.png"], [], ["b.jpg", "a.png"], ["b.jpg"]]
    prompts = [{"images": names, "prompt": "<image>" * len(names) + "?", "label": "!"} for names in images]
    pairs = write_rows(tmp_path, *({**row, "chosen": "!", "rejected": "no"} for row in prompts))
    dpo = f"dpo --pretrain {model} --dataset {pairs} --param_dtype bf16 --train_batch_size 4 --learning_rate 1e-2"
    run_rlhf(*f"{dpo} --num_processes 2 --zero_stage 3 --output {tmp_path / 'dpo'}".split())
    assert read_metrics(tmp_path / "dpo")[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    trained, before = weights_in(tmp_path / "dpo" / "model"), weights_in(model)
    assert trained.keys() == before.keys()
    assert all(tensor.dtype == torch.float32 for name, tensor in trained.items() if name.endswith("A_log"))
    data = write_rows(tmp_path, *prompts)
    run_rlhf(
        *f"grpo --pretrain {tmp_path / 'dpo'} --prompt_data {data} --label_key label --param_dtype fp32".split(),
        *f"--rollout_backend transformers --reward_func {reward_file(VARIED)} --max_new_tokens 6".split(),
        *f"--rollout_batch_size 2 --n_samples_per_prompt 3 --train_batch_size 6 --output {tmp_path / 'grpo'}".split(),
        *["--max_iterations", "2", "--actor_learning_rate", "1e-2"],
    )
    metrics = read_metrics(tmp_path / "grpo")
    assert [found["rollout_diff_max"] < 1e-4 for found in metrics.values()] == [True, True]


def test_a_vision_language_model_trains_on_text_and_keeps_the_weights_for_images(problems, reward_file, tmp_path):
    source = save_tiny_gemma3(tmp_path / "source")
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    examples = tmp_path / "examples.jsonl"
    examples.write_text("".join(json.dumps({"prompt": r["prompt"], "response": r["answer"]}) + "\n" for r in rows))
    run_rlhf(
        *f"sft --pretrain {source} --dataset {examples} {SHARED} --gradient_checkpointing".split(),
        *f"--num_processes 2 --zero_stage 3 --output {tmp_path / 'sft'}".split(),
    )
    run_rlhf(
        *f"grpo --pretrain {tmp_path / 'sft'} --prompt_data {problems} --label_key answer --max_len 64".split(),
        *f"--param_dtype fp32 --reward_func {reward_file(VARIED)} --max_new_tokens 6 --rollout_batch_size 4".split(),
        *f"--n_samples_per_prompt 3 --train_batch_size 12 --max_iterations 2 --output {tmp_path / 'grpo'}".split(),
        *["--rollout_backend", "transformers", "--zero_stage", "2", "--actor_learning_rate", "1e-2"],
    )
    metrics = read_metrics(tmp_path / "grpo")
    assert [found["rollout_diff_max"] < 1e-4 for found in metrics.values()] == [True, True]
    folders = [source, tmp_path / "sft" / "model", tmp_path / "grpo" / "model"]
    start, tuned, trained = map(weights_in, folders)
    assert start.keys() == tuned.keys() == trained.keys()
    kept = {name for name in start if "language_model" not in name}
    assert len(kept) > 30
    for before, after in ((start, tuned), (tuned, trained)):
        assert {name for name in start if before[name].equal(after[name])} == kept
    for folder in folders:
        assert (folder / "preprocessor_config.json").read_bytes() == (source / "preprocessor_config.json").read_bytes()
    model, report = AutoModelForImageTextToText.from_pretrained(folders[-1], output_loading_info=True)
    assert not any(report.values())
    assert model(torch.arange(9)[None]).logits.isfinite().all()
