"""SmolLM2-135M-Instruct from its GGUF file: training and both engines agree with plain transformers."""

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from forked import run_rlhf
from published_model import smollm2_file
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_host import make_engine
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.models.finding import resolve_model_path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROWS = Path(__file__).parents[1] / "data" / "gsm8k" / "train_8.jsonl"
FIRST_LOSS = 1.51157
"""Loss of the eight rows: 820 trained of 1,519 tokens. Other summation orders differ by less than 1e-4."""
NEW_TOKENS = 24
PROMPTS = [
    "Name the capital of France.",
    "Describe the sea in one sentence.",
    "What is 17 + 25?",
    "Write a line about an old clock.",
]


@pytest.fixture(scope="module")
def file() -> Path:
    return smollm2_file()


@pytest.fixture(scope="module")
def folder(file) -> str:
    return resolve_model_path(str(file))


@pytest.fixture(scope="module")
def plain(folder):
    """Return the model as loaded by transformers, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def greedy(plain) -> list[list[int]]:
    """Return the greedy response to each prompt, from `generate` of transformers."""
    model, tokenizer = plain
    responses = []
    for ids in prompt_ids(tokenizer):
        found = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
        responses.append(found[0, len(ids) :].tolist())
    return responses


def prompt_ids(tokenizer) -> list[list[int]]:
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in PROMPTS
    ]
    return [list(ids) for ids in rendered]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def loss_of_rows(model, tokenizer) -> tuple[float, int, int]:
    """Return (mean loss, trained tokens, all tokens) of the chats; the answer and its end token are trained."""
    loss, trained, tokens = 0.0, 0, 0
    for row in lines(ROWS):
        chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(chat, tokenize=False).removesuffix("\n")
        start, ids = len(tokenizer(prompt).input_ids), torch.tensor(tokenizer(whole).input_ids)
        logprobs = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
        loss -= logprobs.gather(-1, ids[start:, None]).sum().item()
        trained, tokens = trained + len(ids) - start, tokens + len(ids)
    return loss / trained, trained, tokens


@torch.inference_mode()
def test_the_first_loss_is_that_of_plain_transformers_and_the_saved_folder_keeps_everything(
    file, folder, plain, tmp_path
):
    flags = "--input_key question --output_key answer --param_dtype fp32 --train_batch_size 8 --max_epochs 1"
    output = run_rlhf("sft", "--pretrain", file, "--dataset", ROWS, *flags.split(), "--output", tmp_path / "sft")
    assert f"{file.name}: weights dequantized from Q4_1, Q8_0 to bf16" in output
    expected, trained, tokens = loss_of_rows(*plain)
    assert (trained, tokens) == (820, 1519 - 8)  # sft keeps the newline after the last turn
    (step,) = lines(tmp_path / "sft" / "metrics.jsonl")
    assert step["loss"] == pytest.approx(expected, abs=2e-5)
    assert step["loss"] == pytest.approx(FIRST_LOSS, abs=1e-4)
    assert step["num_tokens"] == 820
    assert "1,519 tokens" in output

    saved, source = tmp_path / "sft" / "model", Path(folder)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (saved / name).read_bytes() == (source / name).read_bytes(), name
    kept = [json.loads((path / "generation_config.json").read_text()) for path in (saved, source)]
    assert kept[0] == kept[1]
    config = json.loads((saved / "config.json").read_text())
    assert "quantization_config" not in config
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, plain[0].model.layers[0].mlp.up_proj.weight)


def test_greedy_responses_of_the_transformers_engine_are_those_of_generate(folder, plain, greedy):
    engine = make_engine("transformers", folder, EngineSettings(max_model_len=128, dtype="fp32"))
    requests = [GenerationRequest(ids, 0) for ids in prompt_ids(plain[1])]
    generations = asyncio.run(engine.generate(requests, SamplingParams(NEW_TOKENS, greedy=True)))
    asyncio.run(engine.shutdown())
    assert [generation.token_ids for generation in generations] == greedy


@pytest.mark.slow
def test_vllm_answers_as_generate_does_and_has_the_trained_weights_after_pushes(
    file, plain, greedy, tmp_path, reward_file
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    reward = reward_file("def reward_func(responses):\n    return [float(len(text) % 7) for text in responses]\n")
    flags = (
        f"--param_dtype fp32 --max_new_tokens {NEW_TOKENS} --max_len 128 --rollout_batch_size 2 --train_batch_size 4 "
        "--n_samples_per_prompt 2 --max_iterations 2 --num_episodes 9 --actor_learning_rate 1e-4 "
        "--lr_scheduler constant --lr_warmup_ratio 0 --init_kl_coef 0 --rollout_backend vllm"
    )
    given = ["--pretrain", file, "--prompt_data", prompts, "--eval_dataset", prompts, "--reward_func", reward]
    run_rlhf("grpo", *given, *flags.split(), "--output", tmp_path / "grpo")
    before = [row for row in lines(tmp_path / "grpo" / "eval_samples.jsonl") if row["step"] == 0]
    expected = [plain[1].decode(ids, skip_special_tokens=True) for ids in greedy]
    assert sorted(row["response"] for row in before) == sorted(expected)
    trained = [row for row in lines(tmp_path / "grpo" / "metrics.jsonl") if "rollout_k3" in row]
    assert len(trained) == 2
    assert max(row["rollout_k3"] for row in trained) < 1e-6
    assert max(row["rollout_diff_max"] for row in trained) < 1e-3


@pytest.fixture(scope="module")
def preferences(tmp_path_factory) -> dict[str, Path]:
    """Write files with preference pairs and labelled responses: correct answers and answers to other questions."""
    folder, rows = tmp_path_factory.mktemp("preferences"), lines(ROWS)[:4]
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": other["answer"]}
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    labelled = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair, side in zip(pairs, ("chosen", "rejected") * 2, strict=True)
    ]
    files = {"dpo": folder / "pairs.jsonl", "kto": folder / "labelled.jsonl", "rm": folder / "pairs.jsonl"}
    for path, content in ((files["dpo"], pairs), (files["kto"], labelled)):
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "first_loss", "tolerance"), [("dpo", math.log(2), 1e-4), ("kto", 0.5, 1e-4), ("rm", math.log(2), 0.1)]
)
def test_a_preference_loss_begins_at_the_value_of_no_preference(
    command, first_loss, tolerance, file, preferences, tmp_path
):
    flags = "--param_dtype fp32 --train_batch_size 4 --max_epochs 2 --learning_rate 2e-5 --lr_scheduler constant"
    given = ["--pretrain", file, "--dataset", preferences[command], "--output", tmp_path / command]
    run_rlhf(command, *given, *flags.split())
    first, second = lines(tmp_path / command / "metrics.jsonl")
    assert first["loss"] == pytest.approx(first_loss, abs=tolerance)
    assert second["loss"] < first["loss"]


@pytest.mark.slow
@torch.inference_mode()
def test_an_adapter_on_it_is_merged_to_the_model_that_peft_computes(file, folder, plain, tmp_path):
    flags = "--param_dtype fp32 --train_batch_size 8 --max_epochs 1 --lora_rank 8 --learning_rate 1e-3 --warmup_steps 0"
    keys = ["--input_key", "question", "--output_key", "answer"]
    adapter, merged = tmp_path / "sft" / "model", tmp_path / "merged"
    run_rlhf("sft", "--pretrain", file, "--dataset", ROWS, *keys, *flags.split(), "--output", tmp_path / "sft")
    run_rlhf("merge", "--model", adapter, "--output", merged, "--param_dtype", "fp32")
    ids = torch.tensor([prompt_ids(plain[1])[0]])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(base, str(adapter))(ids).logits
    found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert (found - plain[0](ids).logits).abs().max() > 0.1


@pytest.mark.slow
def test_ppo_that_continues_from_its_checkpoint_ends_as_one_never_stopped(file, tmp_path, reward_file):
    prompts, run = tmp_path / "prompts.jsonl", tmp_path / "ppo"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    reward = reward_file("def reward_func(responses):\n    return [float(len(text) % 7) for text in responses]\n")
    flags = (
        "--param_dtype fp32 --max_new_tokens 12 --max_len 96 --rollout_batch_size 2 --train_batch_size 2 "
        "--n_samples_per_prompt 1 --max_iterations 2 --num_episodes 9 --save_steps 1 --init_kl_coef 0 "
        "--actor_learning_rate 1e-5 --rollout_backend transformers"
    )
    command = ["ppo", "--pretrain", file, "--prompt_data", prompts, "--reward_func", reward, *flags.split()]
    run_rlhf(*command, "--output", run)
    whole = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "model")
    newest = max((run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    shutil.rmtree(newest)
    run_rlhf(*command, "--output", run, "--load_checkpoint")
    continued = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(tensor, continued[name]) for name, tensor in whole.items())


@pytest.mark.slow
def test_the_same_weights_in_shards_in_bin_files_and_in_a_hub_cache_are_the_same_model(folder, plain, tmp_path):
    shards, binary = tmp_path / "shards", tmp_path / "binary"
    snapshot = tmp_path / "hub" / "models--org--smollm2" / "snapshots" / "0123abc"
    plain[0].save_pretrained(shards, max_shard_size="200MB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    for target in (binary, snapshot):
        shutil.copytree(folder, target)
    (binary / "model.safetensors").unlink()
    torch.save(load_file(Path(folder) / "model.safetensors"), binary / "pytorch_model.bin")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    program = (
        "import sys, torch\n"
        "from rlhf_cli.config.model import ModelConfig\n"
        "from rlhf_cli.models.loading import load_causal_lm\n"
        "for path in sys.argv[1:]:\n"
        "    model = load_causal_lm(ModelConfig(pretrain=path, param_dtype='fp32', attn_implementation='eager'))\n"
        "    print(sum(float(weight.double().abs().sum()) for weight in model.parameters()))\n"
    )
    places = [folder, str(shards), str(binary), "org/smollm2", str(snapshot.parents[1])]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *places], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sums = done.stdout.split()
    assert len(sums) == len(places)
    assert len(set(sums)) == 1
