"""The recipes of the examples, scaled down to an untrained model with 0.1M parameters and one iteration."""

import json
import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import run_rlhf
from picture_rows import encoded
from tiny_vision import save_tiny_vision
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
SMALL = {
    "GPUS": "1",
    "PROMPTS_PER_ITERATION": "4",
    "SAMPLES": "3",
    "MAX_NEW_TOKENS": "6",
    "MAX_LEN": "1200",
    "PROMPT_LEN": "300",
    "ITERATIONS": "1",
    "FLAGS": "--rollout_backend transformers --param_dtype fp32",
}
ANY_GROUP = SMALL["FLAGS"] + " --dynamic_filtering_reward_range -9 9"  # every answer of such a model is wrong


RECORDING = """#!/bin/sh
printf '%s\\0' "$@" >> "$RECORD"
echo >> "$RECORD"
"""
"""An `rlhf` that only writes its arguments, a line per command."""


def run(script: str, *words: object, folder: Path, **environment: str) -> None:
    """Run the commands of a script, forked from a process that has imported the libraries."""
    program, record = folder / "bin" / "rlhf", folder / "commands"
    program.parent.mkdir()
    program.write_text(RECORDING)
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "RECORD": str(record)} | environment
    subprocess.run([str(SCRIPTS / script), *map(str, words)], env=variables, check=True)
    for line in record.read_text().splitlines():
        run_rlhf(*line.split("\0")[:-1])


@pytest.mark.parametrize(
    ("script", "own", "roles"),
    [
        pytest.param("orz_ppo.sh", {}, {"actor-0", "critic-0", "engine-0"}, marks=pytest.mark.slow),
        pytest.param("r1_zero_grpo.sh", {}, {"actor-0", "ref-0", "engine-0"}, marks=pytest.mark.slow),
        (
            "dapo.sh",
            {"NODES": "1", "ENGINES": "1", "TENSOR_PARALLEL": "1", "TRAIN_BATCH_SIZE": "6", "FLAGS": ANY_GROUP},
            {"actor-0", "engine-0"},
        ),
        pytest.param(
            "skywork_or1.sh", {"STAGES": "6", "FLAGS": ANY_GROUP}, {"actor-0", "engine-0"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_recipe_trains(script, own, roles, model, problems, tmp_path):
    run(script, model, problems, tmp_path / "run", folder=tmp_path, **SMALL | own)
    (output,) = [path.parent for path in tmp_path.rglob("metrics.jsonl")]
    assert {path.stem for path in (output / "logs").glob("*-*.log")} == roles
    metrics = read_metrics(output)[1]
    assert metrics["grad_norm"] >= 0
    assert metrics["weight_version"] == 1
    assert (output / "model" / "model.safetensors").is_file()


def test_the_geometry_recipe_trains_on_pictures(tmp_path):
    save_tiny_vision("qwen2_5_vl", tmp_path / "model")
    pictures = [{"bytes": encoded(56, 84, seed=number), "path": None} for number in range(4)]
    columns = {
        "images": [[picture] for picture in pictures],
        "problem": ["<image>Find x."] * 4,
        "answer": ["3", "\\frac{1}{2}", "90", "8"],
    }
    pq.write_table(pa.table(columns), tmp_path / "geometry.parquet")
    sizes = {"MIN_PIXELS": "784", "MAX_PIXELS": "6272", "TRAIN_BATCH_SIZE": "12"}
    output = tmp_path / "run"
    inputs = (tmp_path / "model", tmp_path / "geometry.parquet")
    run("geo3k_grpo.sh", *inputs, output, folder=tmp_path, **SMALL | sizes)
    metrics = read_metrics(output)[1]
    assert metrics["weight_version"] == 1
    assert metrics["kl"] == pytest.approx(0, abs=1e-4)  # the reference sees the same images
    assert len(list((output / "sample_images").glob("*.png"))) == 4
    assert (output / "model" / "preprocessor_config.json").is_file()


@pytest.fixture(scope="module")
def judge(model, tmp_path_factory) -> Path:
    """Save the model with a random value head."""
    folder = tmp_path_factory.mktemp("judge")
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("command", "roles"),
    [
        ("ppo", {"actor-0", "critic-0", "ref-0", "reward-0", "engine-0"}),
        pytest.param("reinforce++", {"actor-0", "ref-0", "reward-0", "engine-0"}, marks=pytest.mark.slow),
    ],
)
def test_models_and_engines_share_one_machine(command, roles, model, judge, problems, tmp_path):
    output = tmp_path / "run"
    words = (command, model, judge, problems, output)
    run("hybrid_engine.sh", *words, folder=tmp_path, **SMALL | {"TRAIN_BATCH_SIZE": "4"})
    assert {path.stem for path in (output / "logs").glob("*-*.log")} == roles
    metrics = read_metrics(output)[1]
    assert metrics["grad_norm"] > 0
    assert metrics["reward"] != 0
    assert (output / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_code_is_run_and_graded(model, tmp_path):
    small = {"PROMPTS": "2", "GROUP": "2", "ITERATIONS": "1", "MAX_NEW_TOKENS": "6", "MAX_LEN": "400"}
    run("code_rl.sh", model, tmp_path, folder=tmp_path, **small | {"FLAGS": SMALL["FLAGS"]})
    assert read_metrics(tmp_path / "grpo")[1]["weight_version"] == 1
    results = json.loads((tmp_path / "result" / "eval.json").read_text())["results"]
    assert [result["figures"]["accuracy"]["value"] for result in results] == [0, 0]  # the models cannot program
