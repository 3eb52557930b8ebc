"""Distillation with the real engine equals plain PyTorch for all micro-batches and stages of both models."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tiny_tokenizer
from distill_training import MIXED, STEPS, distill_plainly, distill_steps
from site_hooks import undocumented
from tiny_training import CLOSE, NOISE, Layout, farthest
from transformers import AutoModelForCausalLM

from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.distillation import DivergenceSettings
from rlhf_cli.options import build_config
from rlhf_cli.runs.offline.distill import distill_task
from rlhf_cli.trainers.offline.distill import DistillObjective

pytestmark = pytest.mark.usefixtures("group_of_one")


def assert_same_steps(one, other):
    for metrics, expected in zip(one.metrics, other.metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=2e-6)
    assert farthest(one.weights, other.weights) < CLOSE


def test_packed_steps_are_those_of_one_sequence_at_a_time_in_plain_pytorch(tiny_model_dir, tiny_llama_dir):
    expected = distill_plainly(tiny_model_dir, tiny_llama_dir, beta=0.4, temperature=0.9)
    objective = DistillObjective(DivergenceSettings(0.4, 0.9))
    found = distill_steps(tiny_model_dir, tiny_llama_dir, 2, Layout(max_tokens=30), objective=objective)
    assert [metrics["loss"] for metrics in found.metrics] == pytest.approx(expected, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize(("stage", "teacher_stage"), [(0, 0), (1, 3), (2, 0), (3, 3), (3, 0)])
def test_neither_stages_nor_micro_batches_change_a_step(tiny_model_dir, tiny_llama_dir, stage, teacher_stage):
    whole = distill_steps(tiny_model_dir, tiny_llama_dir, 2, Layout())
    one_by_one = Layout(max_sequences=1)
    cut = distill_steps(tiny_model_dir, tiny_llama_dir, stage, one_by_one, teacher_stage=teacher_stage)
    assert_same_steps(cut, whole)


def test_every_parameter_moves(tiny_model_dir, tiny_llama_dir):
    trained = distill_steps(tiny_model_dir, tiny_llama_dir, 2, Layout()).weights
    start = distill_steps(tiny_model_dir, tiny_llama_dir, 2, Layout(), steps=[]).weights
    assert [name for name, weight in trained.items() if weight.equal(start[name]) and NOISE not in name] == []


def test_the_loss_is_divergence_and_likelihood_by_their_shares(tiny_model_dir, tiny_llama_dir):
    mixed, divergence_alone = (
        distill_steps(tiny_model_dir, tiny_llama_dir, 0, Layout(), objective=objective, steps=STEPS[:1]).metrics[0]
        for objective in (MIXED, replace(MIXED, kd_coef=1.0))
    )
    assert mixed["loss"] == pytest.approx(0.7 * mixed["divergence"] + 0.3 * mixed["nll"], rel=1e-6)
    assert mixed["divergence"] == pytest.approx(divergence_alone["loss"], rel=1e-6)
    assert "nll" not in divergence_alone


@pytest.mark.parametrize(("beta", "measure"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_the_ends_of_beta_are_the_two_kl_divergences(tiny_model_dir, tiny_llama_dir, beta, measure):
    objective = DistillObjective(DivergenceSettings(beta, 0.7))
    metrics = distill_steps(tiny_model_dir, tiny_llama_dir, 0, Layout(), objective=objective).metrics
    assert [step["loss"] for step in metrics] == pytest.approx([step[measure] for step in metrics], rel=1e-6)


def test_every_metric_of_a_step_is_on_the_page(tiny_model_dir, tiny_llama_dir):
    (metrics,) = distill_steps(tiny_model_dir, tiny_llama_dir, 0, Layout(), steps=STEPS[:1]).metrics
    assert not undocumented("distill", metrics)


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(40)))
    return path


def task_of(rows: Path, student: str, teacher: str, **given: str) -> Any:
    least = {"pretrain": student, "teacher_pretrain": teacher, "dataset": str(rows), "output": "x"}
    return distill_task(build_config(DistillConfig, least | {"param_dtype": "fp32"} | given))


def with_rows(folder: str, to: Path, count: int) -> str:
    """Return a copy of the model with this many embedding rows."""
    shutil.copytree(folder, to)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(count, mean_resizing=False)
    model.save_pretrained(to)
    return str(to)


def test_a_larger_padded_vocabulary_of_the_same_tokens_is_a_teacher(rows, tmp_path, tiny_model_dir, tiny_llama_dir):
    larger = with_rows(tiny_llama_dir, tmp_path / "larger", 320)
    task_of(rows, tiny_model_dir, larger)
    plain, padded = (distill_steps(tiny_model_dir, teacher, 2, Layout()) for teacher in (tiny_llama_dir, larger))
    assert_same_steps(padded, plain)


def test_a_teacher_of_other_tokens_is_refused_in_one_sentence(rows, tmp_path, tiny_model_dir, tiny_llama_dir):
    other = Path(shutil.copytree(tiny_llama_dir, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["7"], ids["8"] = ids["8"], ids["7"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        UsageError, match=r"^--teacher_pretrain '.*other' has a different vocabulary .* 2 of 260 tokens"
    ):
        task_of(rows, tiny_model_dir, str(other))
    few = with_rows(tiny_llama_dir, tmp_path / "few", len(make_tiny_tokenizer()) - 1)
    with pytest.raises(UsageError, match=r"^--teacher_pretrain '.*few' has 259 embeddings, .* has 260 tokens"):
        task_of(rows, tiny_model_dir, few)
    with pytest.raises(UsageError, match=r"^--teacher_pretrain: .*there is no such folder"):
        task_of(rows, tiny_model_dir, "/nowhere")


def test_what_the_teacher_cannot_do_names_the_teacher(rows, tiny_model_dir, tiny_llama_dir):
    with pytest.raises(UsageError, match="sequence_parallel_size 2 does not divide the 1 ranks"):
        task_of(rows, tiny_model_dir, tiny_llama_dir, sequence_parallel_size="2")
