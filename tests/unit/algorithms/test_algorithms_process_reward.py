"""Loss and metrics of process reward models, compared with manual calculations."""

import math

import pytest
import torch

from rlhf_cli.algorithms.aggregation import StepTotals, combine_metrics
from rlhf_cli.algorithms.process_reward import finish_step_metrics, first_true, step_loss, step_metrics

LOGITS = torch.tensor([2.0, -1.0, 1.0, 3.0, -2.0, 0.5, -0.5])
LABELS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
CU = torch.tensor([0, 3, 5, 7])
"""Three solutions: first error found, false alarm in a correct solution, first error found."""


def test_the_loss_is_the_cross_entropy_of_hard_and_soft_labels():
    loss_K = step_loss(torch.tensor([0.0, 1.0, -2.0]), torch.tensor([1.0, 0.0, 0.3]))
    p = 1 / (1 + math.exp(2))
    expected = [math.log(2), math.log(1 + math.e), -0.3 * math.log(p) - 0.7 * math.log(1 - p)]
    assert loss_K.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_gradient_of_the_loss_is_the_probability_less_the_label():
    logits_K = torch.tensor([0.3, -4.0], requires_grad=True)
    step_loss(logits_K, torch.tensor([1.0, 0.2])).sum().backward()
    assert logits_K.grad.tolist() == pytest.approx((logits_K.sigmoid() - torch.tensor([1.0, 0.2])).tolist(), rel=1e-5)


def test_the_first_true_value_of_each_segment():
    values_K = torch.tensor([False, True, True, False, False, True])
    assert first_true(values_K, torch.tensor([0, 3, 5, 6])).tolist() == [1, -1, 0]
    assert first_true(values_K[:0], torch.tensor([0])).tolist() == []


def test_figures_by_hand():
    totals = StepTotals(num_tokens=7, num_sequences=3)
    metrics = {name: float(part) for name, part in step_metrics(LOGITS, LABELS, CU, totals).items()}
    found = finish_step_metrics(metrics)
    assert found == pytest.approx(
        {
            "accuracy": 5 / 7,
            "wrong_steps": 3 / 7,
            "first_error_accuracy": 2 / 3,
            "erroneous": 2 / 3,
            "wrong_f1": 2 * 2 / (3 + 3),  # two of three wrong steps found with three predictions
            "right_f1": 2 * 3 / (4 + 4),
            "error_accuracy": 1.0,
            "correct_accuracy": 0.0,
            "processbench_f1": 0.0,
        }
    )


def test_parts_of_micro_batches_add_up_to_the_figures_of_the_step():
    totals = StepTotals(num_tokens=7, num_sequences=3)
    whole = step_metrics(LOGITS, LABELS, CU, totals)
    one = step_metrics(LOGITS[:3], LABELS[:3], CU[:2], totals)
    idle = step_metrics(LOGITS[:0], LABELS[:0], torch.tensor([0]), totals)
    other = step_metrics(LOGITS[3:], LABELS[3:], CU[1:] - 3, totals)
    added = combine_metrics(combine_metrics(one, idle), other)
    assert {name: float(v) for name, v in added.items()} == pytest.approx({k: float(v) for k, v in whole.items()})


def test_figures_about_nothing_are_left_out():
    right = step_metrics(torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([0, 1]), StepTotals(1, 1))
    found = finish_step_metrics({name: float(part) for name, part in right.items()})
    assert found["correct_accuracy"] == found["right_f1"] == 1.0
    assert not {"wrong_f1", "error_accuracy", "processbench_f1"} & found.keys()
