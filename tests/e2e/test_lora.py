"""End-to-end tests of `--lora_rank` and `rlhf merge`: train, interrupt, resume, merge and use, offline and online."""

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import run_rlhf
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli import cli
from rlhf_cli.models.weight_files import open_weights
from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def merge(model: Path, output: Path, *words: object) -> None:
    """Run `rlhf merge` in this process, which has already imported the libraries."""
    assert cli.main([str(word) for word in ("merge", "--model", model, "--output", output, *words)]) == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with sums and a small untrained model."""
    folder = tmp_path_factory.mktemp("adapters")
    rng = random.Random(0)
    sums = [(rng.randrange(100), rng.randrange(100)) for _ in range(64)]
    rows = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a, b in sums]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    shape = ("--hidden_size", 64, "--intermediate_size", 96, "--num_hidden_layers", 2, "--num_attention_heads", 2)
    run_rlhf("scratch", "--dataset", folder / "sums.jsonl", *shape, "--vocab_size", 300, "--output", folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def sft(place: Path) -> Callable[..., str]:
    def run(name: str, *words: object) -> str:
        usual: tuple[object, ...] = (
            "--dataset",
            place / "sums.jsonl",
            "--output",
            place / name,
            "--train_batch_size",
            8,
        )
        usual += ("--max_epochs", 3, "--learning_rate", "1e-2", "--param_dtype", "fp32", "--no_use_tensorboard")
        return run_rlhf("sft", *usual, *words)

    return run


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def same_weights(one: Path, other: Path) -> bool:
    first, second = open_weights(one), open_weights(other)
    assert set(first.names()) == set(second.names())
    return all(torch.equal(first.read(name), second.read(name)) for name in first.names())


def logits(model: AutoModelForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


def test_an_adapter_is_trained_stopped_continued_and_merged(place, sft):
    lora = ("--pretrain", place / "tiny", "--lora_rank", 8, "--lora_dropout", 0.1, "--save_steps", 8)
    said = sft("whole", *lora)
    assert "M trainable" in said
    shown = losses(place / "whole")
    assert shown[-1] < shown[0] - 0.2
    adapter = place / "whole" / "model"
    assert (adapter / "adapter_model.safetensors").is_file()
    assert not (adapter / "model.safetensors").exists()

    # As if killed after step 16.
    stopped = place / "stopped"
    sft("stopped", *lora)
    for path in (stopped / "checkpoints" / "step_000024", stopped / "model"):
        subprocess.run(["rm", "-r", str(path)], check=True)
    sft("stopped", *lora, "--load_checkpoint")
    assert losses(stopped) == shown
    for run in ("whole", "stopped"):
        merge(place / run, place / f"{run}_merged")
    assert same_weights(place / "whole_merged", place / "stopped_merged")

    said = run_rlhf(
        "merge", "--model", place / "whole" / "checkpoints" / "step_000024", "--output", place / "of_checkpoint"
    )
    assert "parameters in bfloat16, reloaded and run on 8 tokens" in said
    assert same_weights(place / "whole_merged", place / "of_checkpoint")

    tokenizer = AutoTokenizer.from_pretrained(place / "whole_merged")
    tokens = tokenizer("1+1=", return_tensors="pt").input_ids
    merge(adapter, place / "in_fp32", "--param_dtype", "fp32")
    merged = AutoModelForCausalLM.from_pretrained(place / "in_fp32")
    trained = AutoModelForCausalLM.from_pretrained(place / "tiny", dtype=torch.float32)
    before = logits(trained, tokens)
    trained.load_adapter(str(adapter))
    torch.testing.assert_close(logits(merged, tokens), logits(trained, tokens), atol=1e-4, rtol=1e-4)
    assert (logits(trained, tokens) - before).abs().max() > 0.1
    assert tokenizer.chat_template

    sft("further", "--pretrain", place / "whole", "--max_steps", 4)
    assert losses(place / "further")[0] < shown[0] - 0.1
    sft("on_top", "--pretrain", place / "whole_merged", "--lora_rank", 2, "--max_steps", 4)
    assert losses(place / "on_top")[0] < shown[0] - 0.1


@pytest.mark.parametrize(("stage", "rank"), [(1, 0), (2, 4), (3, 0), (3, 4)])
def test_a_checkpoint_of_two_ranks_is_what_the_run_saved(place, sft, stage, rank):
    name = f"two_{stage}_{rank}"
    words = ("--pretrain", place / "tiny", "--zero_stage", stage, "--num_processes", 2)
    sft(name, *words, "--lora_rank", rank, "--save_steps", 8, "--max_steps", 8)
    merge(place / name / "checkpoints" / "step_000008", place / f"{name}_merged")
    expected = place / name / "model"
    if rank:
        merge(place / name, place / f"{name}_expected")
        expected = place / f"{name}_expected"
    assert same_weights(place / f"{name}_merged", expected)


def test_another_adapter_does_not_continue_a_checkpoint(place):
    output = ("--output", place / "whole", "--dataset", place / "sums.jsonl", "--load_checkpoint")
    usual = ("--train_batch_size", 8, "--max_epochs", 3, "--param_dtype", "fp32")
    said = run_rlhf("sft", "--pretrain", place / "tiny", *output, *usual, status=2)
    assert "belongs to another run: its lora_rank is 8, not None" in said


def sums_online(place: Path, *words: object) -> list[dict[str, float]]:
    """Run on the sums and return the metrics; the last argument is the name of the run."""
    prompts = ("--prompt_data", place / "sums.jsonl", "--label_key", "response", "--reward_funcs", "exact")
    rollout = ("--max_len", 64, "--max_new_tokens", 6, "--rollout_batch_size", 4, "--n_samples_per_prompt", 2)
    output = place / str(words[-1])
    run_rlhf(*words[:-1], *prompts, *rollout, "--train_batch_size", 4, "--output", output)
    return list(read_metrics(output).values())


RATES = ("--actor_learning_rate", "1e-2", "--critic_learning_rate", "1e-2")
PPO = (*RATES, "--max_iterations", 2, "--lora_rank", 4, "--rollout_backend", "vllm")


def assert_engine_agrees(metrics: dict[str, float]) -> None:
    """Check the log-probs of the engine with the bfloat16 tolerance of test_ppo."""
    assert metrics["rollout_diff_max"] < 0.2
    assert metrics["rollout_prob_correlation"] > 0.99


def test_actor_and_critic_train_adapters_online_and_engines_add_them_to_the_model_or_get_it_merged(place):
    pushed = ("--lora_push", "adapter", "--use_rslora", "--param_dtype", "fp32")
    first, second = sums_online(place, "ppo", "--pretrain", place / "tiny", *PPO, *pushed, "ppo")
    assert '"max_lora_rank": 8' in (place / "ppo" / "logs" / "engine-0.log").read_text()
    assert {path.stem for path in (place / "ppo" / "logs").glob("*-*.log")} == {"actor-0", "critic-0", "engine-0"}
    assert first["kl"] == 0.0  # a new adapter changes nothing, and the reference is the base model
    assert abs(second["kl"]) > 1e-4
    # The engines also receive the merged weights before the first iteration.
    exact = ("--rollout_backend", "transformers", "--param_dtype", "fp32", "--max_iterations", 1)
    (third,) = sums_online(place, "rloo", "--pretrain", place / "ppo", *exact, "rloo")
    assert abs(third["kl"]) > 1e-4
    for metrics in (first, second, third):
        assert metrics["rollout_diff_max"] < 1e-3


def answers_of(folder: Path) -> dict[str, list[str]]:
    """Return the responses of an evaluation in order, by model."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(Path(row["pretrain"]).name, []).append(row["response"])
    return found


@pytest.mark.slow
def test_adapters_answer_on_one_engine_with_their_base_as_their_merged_models_do(place):
    merge(place / "ppo", place / "ppo_merged", "--param_dtype", "fp32")
    merge(place / "whole", place / "whole_in_fp32", "--param_dtype", "fp32")
    prompts = ("--prompt_data", place / "sums.jsonl", "--label_key", "response", "--reward_funcs", "exact")
    usual = (*prompts, "--max_len", 64, "--max_new_tokens", 6, "--param_dtype", "fp32")
    names = ("ppo", "tiny", "whole/checkpoints/step_000024")
    models = ",".join(str(place / name) for name in names)
    said = run_rlhf("eval", "--pretrain", models, *usual, "--rollout_backend", "vllm", "--output", place / "eval")
    assert f"engines load {place / 'tiny'} once for" in " ".join(said.split())
    assert [path.name for path in (place / "eval" / "logs").glob("model_*")] == ["model_1"]
    assert {path.name for path in (place / "eval").glob(".*")} == {".lock"}

    merged = ",".join(str(place / name) for name in ("ppo_merged", "tiny", "whole_in_fp32"))
    exact = ("--rollout_backend", "transformers", "--output", place / "eval_merged")
    run_rlhf("eval", "--pretrain", merged, *usual, *exact)
    found, expected = answers_of(place / "eval"), answers_of(place / "eval_merged")
    assert list(found) == ["ppo", "tiny", "step_000024"]
    assert list(found.values()) == list(expected.values())
    assert len({tuple(answers) for answers in found.values()}) == 3


@pytest.mark.slow
def test_a_compiled_engine_samples_from_what_was_pushed(place):
    first, second = sums_online(place, "ppo", "--pretrain", place / "tiny", *PPO, "--no_enforce_eager", "compiled")
    assert abs(second["kl"]) > 1e-4
    for metrics in (first, second):
        assert_engine_agrees(metrics)
