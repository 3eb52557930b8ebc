"""End-to-end test of `rlhf generate` with real engines: killed, resumed, and scored by a reward model."""

import asyncio
import json
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from forked import Command, run_rlhf, started_rlhf
from safetensors.torch import load_file, save_file

from rlhf_cli.backends.process.signals import INTERRUPTED
from rlhf_cli.config.data import PreferenceDataConfig, PromptConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.preference_data import PAIRS
from rlhf_cli.data.prompts import load_prompts
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.models.weight_files import fingerprint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPTS, SAMPLES = 32, 4
REWARD = "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Return (model, prompts, reward file). Some prompts are chat messages; the reward is the length."""
    root = tmp_path_factory.mktemp("inputs")
    problems, model, reward = root / "problems.jsonl", root / "model", root / "reward.py"
    rows: list[dict] = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(8)]
    for row in rows[::4]:
        row["prompt"] = [{"role": "system", "content": "Add."}, {"role": "user", "content": row["prompt"]}]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(REWARD)
    texts = root / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": "1+2= Add.", "answer": "3"}) + "\n" for _ in range(4)))
    size = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2"
    run_rlhf("scratch", "--dataset", texts, *size.split(), "--vocab_size", 300, "--output", model)
    return model, problems, reward


def generate_words(inputs: tuple[Path, Path, Path], output: Path, *further: str) -> list[str]:
    model, problems, reward = inputs
    words = (
        f"generate --pretrain {model} --prompt_data {problems} --reward_func {reward} --rollout_backend transformers "
        f"--max_len 192 --max_new_tokens 96 --rollout_batch_size 2 --n_samples_per_prompt {SAMPLES} "
        f"--select best_worst --output {output}"
    )
    return [*words.split(), *further]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, inputs) -> Path:
    """Return the folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("generate") / "whole"
    run_rlhf(*generate_words(inputs, output))
    assert_nothing_left(output)
    return output


def assert_nothing_left(output: Path, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while left := [process for process in psutil.process_iter() if uses(process, str(output))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def uses(process: psutil.Process, folder: str) -> bool:
    try:
        opened = [file.path for file in process.open_files()]
        return any(path.startswith(folder) for path in opened) or folder in " ".join(process.cmdline())
    except psutil.Error:
        return False


CHUNK_ROWS = 2 * SAMPLES


def num_rows(output: Path) -> int:
    samples = output / "samples.jsonl"
    return samples.read_bytes().count(b"\n") if samples.exists() else 0


def wait_for_rows(output: Path, command: Command, *, more: int = CHUNK_ROWS, seconds: float = 300) -> None:
    """Wait until the command has written this many additional rows."""
    deadline, enough = time.monotonic() + seconds, num_rows(output) + more
    while num_rows(output) < enough:
        assert command.is_running(), command.printed()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def test_every_prompt_has_its_samples_with_scores(finished):
    rows = rows_of(finished / "samples.jsonl")
    places = [(row["group"], row["sample"]) for row in rows]
    assert places == [(prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)]
    assert all(row["length"] == 96 or row["finish_reason"] == "stop" for row in rows)
    assert all(row["reward"] >= len(row["response"]) for row in rows)
    assert isinstance(rows[0]["prompt"], list)
    assert isinstance(rows[SAMPLES]["prompt"], str)
    assert len({row["response"] for row in rows}) > len(rows) / 2


def test_selected_pairs_are_preference_data(finished, inputs):
    selected = rows_of(finished / "selected.jsonl")
    config = PreferenceDataConfig(dataset=str(finished / "selected.jsonl"), data_cache="off")
    tokenizer = load_tokenizer(ModelConfig(pretrain=str(inputs[0])))
    data = PAIRS.load(config, tokenizer, dataset=config.dataset, split="train", seed=0)
    assert len(data.items) == len(selected) > 5
    assert [data.items[i].margin for i in range(len(selected))] == [row["margin"] for row in selected]
    assert min(row["margin"] for row in selected) > 0


def test_a_killed_generation_goes_on_to_the_same_rows(finished, inputs, tmp_path):
    output = tmp_path / "killed"
    words = generate_words(inputs, output, "--load_checkpoint")
    with started_rlhf(*words) as command:
        wait_for_rows(output, command, more=2 * CHUNK_ROWS)
        command.kill()
    assert_nothing_left(output)
    assert not (output / "selected.jsonl").exists()
    with (output / "samples.jsonl").open("a") as file:
        file.write('{"step": 9, "prompt')  # as if killed in the middle of a line
    printed = run_rlhf(*words)
    assert "after chunk" in printed
    for name in ("samples.jsonl", "selected.jsonl"):
        assert (output / name).read_bytes() == (finished / name).read_bytes()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """Return the folder of a run that was interrupted by each signal in turn and resumed after each."""
    return tmp_path_factory.mktemp("interrupted") / "generate"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_stop_finishes_the_chunk_and_tells_how_to_continue(finished, inputs, interrupted, signum):
    before = num_rows(interrupted)
    with started_rlhf(*generate_words(inputs, interrupted, "--load_checkpoint")) as command:
        wait_for_rows(interrupted, command)
        command.stop(signum)
        printed = command.finish(status=INTERRUPTED)
    assert "The run ends as soon as a chunk is answered, with its rows saved; a second Ctrl-C" in printed
    assert "--load_checkpoint" in printed
    written, whole = ((folder / "samples.jsonl").read_bytes() for folder in (interrupted, finished))
    assert num_rows(interrupted) > before
    assert num_rows(interrupted) % CHUNK_ROWS == 0
    assert whole.startswith(written)
    assert_nothing_left(interrupted)


def test_a_finished_generation_is_selected_from_again_without_engines(finished, inputs, tmp_path):
    words = generate_words(inputs, finished, "--load_checkpoint")
    words[words.index("best_worst")] = "best"
    before = (finished / "selected.jsonl").read_bytes()
    run_rlhf(*words)
    best = rows_of(finished / "selected.jsonl")
    assert {tuple(row) for row in best} == {("prompt", "response", "score")}
    (finished / "selected.jsonl").write_bytes(before)
    refused = run_rlhf(*words, "--temperature", "0.5", status=2)
    assert "its temperature is 1.0, not 0.5" in refused
    other = tmp_path / "other"
    shutil.copytree(inputs[0], other)
    assert fingerprint(other) == fingerprint(inputs[0])
    weights = load_file(other / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    assert fingerprint(other) != fingerprint(inputs[0])


def test_a_reward_model_reads_the_sampled_tokens_to_the_last(inputs, tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from rlhf_cli.backends.rollout.engine import EngineSettings
    from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine

    model, problems, _ = inputs
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(judge.score.weight)
    tokenizer = AutoTokenizer.from_pretrained(model)
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    output = tmp_path / "scored"
    words = (
        f"generate --pretrain {model} --prompt_data {problems} --reward_pretrain {tmp_path / 'judge'} --max_samples 4 "
        f"--rollout_backend transformers --max_len 64 --max_new_tokens 8 --param_dtype fp32 --temperature 0 "
        f"--output {output}"
    )
    run_rlhf(*words.split())
    assert_nothing_left(output)

    rows = rows_of(output / "samples.jsonl")
    prompts = load_prompts(PromptConfig(prompt_data=str(problems)), tokenizer, max_new_tokens=8, seed=0).prompts[:4]
    engine = TransformersEngine(str(model), EngineSettings(max_model_len=64, dtype="fp32"))
    requests = [GenerationRequest(prompt.prompt_ids, seed=0) for prompt in prompts]
    generations = asyncio.run(engine.generate(requests, SamplingParams(8, greedy=True)))
    for row, prompt, generation in zip(rows, prompts, generations, strict=True):
        token_ids = torch.tensor([prompt.prompt_ids + generation.token_ids])
        hidden = judge.model(token_ids).last_hidden_state[0, -1]
        assert row["reward"] == pytest.approx(judge.score(hidden).item(), abs=1e-4)
        assert row["reward/reward_model"] == row["reward"]
    assert len({row["reward"] for row in rows}) > 1


@pytest.fixture(scope="module")
def evaluation(inputs, tmp_path_factory) -> tuple[Path, list[str]]:
    """Return the folder and the command line of an evaluation that was interrupted and resumed."""
    root = tmp_path_factory.mktemp("evaluation")
    judge, output = root / "judge.py", root / "eval"
    judge.write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(len(query) % 2 == 0) for query in queries]\n"
    )
    words = (
        f"eval --pretrain {inputs[0]} --prompt_data {inputs[1]} --reward_func {judge} --pass_score 1 --temperature 1 "
        f"--n_samples_per_prompt {SAMPLES} --k 1,2 --rollout_backend transformers --max_len 64 --max_new_tokens 40 "
        f"--rollout_batch_size 2 --output {output} --write_pass_rate {root / 'rates.jsonl'} --load_checkpoint"
    )
    return output, words.split()


def test_an_evaluation_finishes_its_chunk_when_its_terminal_is_closed(evaluation):
    output, words = evaluation
    with started_rlhf(*words) as command:
        wait_for_rows(output, command)
        command.stop(signal.SIGHUP)
        printed = command.finish(status=INTERRUPTED)
    assert "The run ends as soon as a chunk is answered, with its rows saved; a second Ctrl-C" in printed
    assert "--load_checkpoint" in printed
    assert num_rows(output) % CHUNK_ROWS == 0
    assert not (output / "eval.json").exists()
    assert_nothing_left(output)


def test_an_evaluation_that_was_stopped_counts_its_samples_and_is_not_repeated(inputs, evaluation):
    output, words = evaluation
    printed = run_rlhf(*words)
    assert_nothing_left(output)
    samples = rows_of(output / "samples.jsonl")
    (result,) = json.loads((output / "eval.json").read_text())["results"]
    right = [sum(row["reward"] for row in samples[i : i + 4]) for i in range(0, len(samples), 4)]
    figures = {name: figure["value"] for name, figure in result["figures"].items()}
    assert len(right) == result["num_prompts"] == PROMPTS
    assert figures["accuracy"] == figures["pass@1"] == pytest.approx(sum(right) / len(samples))
    pairs = [1 - (4 - count) * (3 - count) / 12 for count in right]
    assert figures["pass@2"] == pytest.approx(sum(pairs) / len(pairs))
    assert f"{100 * figures['accuracy']:.1f}%" in printed
    expected = [row | {"pass_rate": count / 4} for row, count in zip(rows_of(inputs[1]), right, strict=True)]
    assert rows_of(output.parent / "rates.jsonl") == expected

    before = (output / "samples.jsonl").read_bytes()
    again = run_rlhf(*words)
    assert again.splitlines()[-4:] == printed.splitlines()[-4:]
    assert (output / "samples.jsonl").read_bytes() == before


PROGRAM = """
import json, os, sys
from urllib.request import Request, urlopen

messages = [{"role": "user", "content": json.load(sys.stdin)["answer"]}]
for _ in range(2):
    body = json.dumps({"messages": messages, "max_tokens": 4}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as reply:
        messages += [json.load(reply)["choices"][0]["message"], {"role": "user", "content": "again"}]
print(json.dumps({"reward": len(messages)}))
"""


@pytest.mark.slow
def test_the_same_model_shows_no_difference_and_is_evaluated_once(inputs, evaluation, tmp_path):
    output, words = evaluation
    run_rlhf(*words)
    call = ("compare", output, inputs[0], "--output", tmp_path / "kept", "--by", "source")
    printed = run_rlhf(*call)
    assert f"{PROMPTS} prompts with {SAMPLES} samples each" in printed
    # Equal seeds give equal responses, also in another evaluation.
    assert "accuracy: no difference shown (all prompts have equal values)" in printed
    (folder,) = (tmp_path / "kept").iterdir()
    assert [row["response"] for row in rows_of(folder / "samples.jsonl")] == [
        row["response"] for row in rows_of(output / "samples.jsonl")
    ]
    assert "  Engine " in printed
    assert "  Engine " not in run_rlhf(*call)
    assert list((tmp_path / "kept").iterdir()) == [folder]
    assert "differ in temperature (1.0, 0.5)" in run_rlhf(*call, "--temperature", "0.5", status=2)


def test_an_agent_program_plays_an_episode_for_each_response(inputs, tmp_path):
    output, program, problems = tmp_path / "played", tmp_path / "program.py", tmp_path / "problems.jsonl"
    program.write_text(PROGRAM)
    problems.write_text("".join(inputs[1].read_text().splitlines(keepends=True)[1:3]))
    words = ["generate", "--pretrain", inputs[0], "--prompt_data", problems, "--output", output]
    limits = "--max_turns 2 --max_new_tokens 8 --max_len 128 --n_samples_per_prompt 2 --rollout_backend transformers"
    run_rlhf(*words, *limits.split(), "--agent_command", f"{sys.executable} {program}")
    rows = rows_of(output / "samples.jsonl")
    assert [row["reward"] for row in rows] == [5.0] * 4
    for row, answer in zip(rows, ("1", "1", "2", "2"), strict=True):
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
        assert [message["content"] for message in row["messages"][::2]] == [answer, "again"]
        assert "branches" not in row
    assert_nothing_left(tmp_path)
