"""`rlhf prm` compared with a dense computation on single sequences, and models that it rejects or writes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from preference_training import make_steps
from transformers import AutoModelForSequenceClassification, Qwen2Config

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.commands.prm import PRMConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.options import build_config
from rlhf_cli.runs.offline.prm import prm_task
from rlhf_cli.trainers.offline.prm import StepItems, step_objective

NUMBERS = [0, 2, 3, 5]


def backbone(folder):
    return load_value_backbone(ModelConfig(pretrain=folder, param_dtype="fp32"))


def dense_loss(model, items):
    """Return the mean cross-entropy, computed by its formula at the last token of each step."""
    terms = []
    for item in items:
        states = model.model(input_ids=torch.from_numpy(item.token_ids).long()[None]).last_hidden_state[0]
        for end, label in zip(item.ends.tolist(), item.labels.tolist(), strict=True):
            if not np.isnan(label):
                p = torch.sigmoid(states[end - 1] @ model.score.weight[0])
                terms.append(-label * p.log() - (1 - label) * (1 - p).log())
    return torch.stack(terms).mean()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_loss_and_gradient_of_a_pack_are_those_of_single_sequences_computed_densely(tiny_model_dir):
    data = make_steps()
    chosen = [data.items[number] for number in NUMBERS]
    model = backbone(tiny_model_dir)
    model.set_attn_implementation("eager")
    expected = dense_loss(model, chosen)
    expected.backward()
    wanted = gradients(model)

    packed = backbone(tiny_model_dir)
    totals = StepTotals(int(data.columns["num_trained"][NUMBERS].sum()), len(NUMBERS))
    loss, _ = step_objective(ValueModel(packed), StepItems(data).collate(NUMBERS), totals)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found = gradients(packed)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def config_of(folder, model, **given):
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1", "completions": ["2", "so 2"], "labels": [True, True]}) + "\n")
    return build_config(
        PRMConfig, {"pretrain": str(model), "dataset": str(rows), "output": str(folder / "out"), **given}
    )


def test_a_trained_model_has_its_separator_in_its_configuration(tiny_model_dir, tmp_path):
    task = prm_task(config_of(tmp_path, tiny_model_dir, step_separator="\\n\\n", param_dtype="fp32"))
    model = task.load(task.model.base)
    model.save_pretrained(tmp_path / "saved")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").config.step_separator == "\n\n"
    assert task.identity() == {"step_separator": "\n\n"}


@pytest.mark.parametrize("dataset", ["rows.jsonl", "others.jsonl"])
def test_an_evaluation_reads_all_steps_if_training_reads_the_last(dataset, tiny_model_dir, tmp_path):
    config = config_of(tmp_path, tiny_model_dir, train_on_last_step_only=True, eval_dataset=str(tmp_path / dataset))
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "others.jsonl")
    items = prm_task(config).items
    assert items.data.num_trained.tolist() == [1]
    assert items.eval_data is not None
    assert items.eval_data.num_trained.tolist() == [2]


@pytest.mark.parametrize("kind", ["Qwen2ForTokenClassification", "Qwen2ForProcessRewardModel"])
def test_a_model_with_two_numbers_for_a_step_is_refused(kind, tiny_model_dir, tmp_path):
    config = Qwen2Config.from_pretrained(tiny_model_dir)
    config.architectures, config.num_labels = [kind], 2
    folder = tmp_path / "classes"
    AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1).save_pretrained(folder)
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_model_dir) / name, folder)
    with pytest.raises(UsageError, match=f"is {kind} with 2 logits per step"):
        prm_task(config_of(tmp_path, folder))
