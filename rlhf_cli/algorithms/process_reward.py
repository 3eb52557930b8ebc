"""Loss and metrics for process reward models, which estimate the probability that each solution step is correct."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, sequence_mean, token_mean
from rlhf_cli.algorithms.ragged import segment_ids

_WRONG, _CALLED_WRONG, _FOUND_WRONG = "wrong_steps", "called_wrong", "found_wrong"
_ERRONEOUS, _FOUND_ERROR, _PASSED = "erroneous", "found_error", "passed"


def step_loss(logits_K: Tensor, labels_K: Tensor) -> Tensor:
    """Compute the cross-entropy per step in nats: `-y log s(x) - (1 - y) log(1 - s(x))`.

    Labels are 1 (correct), 0 (wrong) or a probability: hard and soft estimation in arXiv 2312.08935.
    """
    return binary_cross_entropy_with_logits(logits_K, labels_K, reduction="none")


def step_metrics(logits_K: Tensor, labels_K: Tensor, cu: Tensor, totals: StepTotals) -> Metrics:
    """Compute partial fractions of steps and solutions for `finish_step_metrics`; `cu` `[B+1]` bounds the solutions.

    A step is predicted wrong below probability 0.5, and is wrong if its label is below 0.5.
    """
    # A logit of 0 is probability 0.5.
    called_K, wrong_K = logits_K.detach() < 0, labels_K < 0.5
    called_B, wrong_B = first_true(called_K, cu), first_true(wrong_K, cu)
    same_B, is_erroneous_B = called_B == wrong_B, wrong_B >= 0
    of_steps = {
        "accuracy": called_K == wrong_K,
        _WRONG: wrong_K,
        _CALLED_WRONG: called_K,
        _FOUND_WRONG: called_K & wrong_K,
    }
    of_solutions = {
        "first_error_accuracy": same_B,
        _ERRONEOUS: is_erroneous_B,
        _FOUND_ERROR: same_B & is_erroneous_B,
        _PASSED: same_B & ~is_erroneous_B,
    }
    # F1 and the conditional accuracies are ratios, which do not add up over micro-batches. Reduce the counts instead.
    return {name: token_mean(values.float(), totals) for name, values in of_steps.items()} | {
        name: sequence_mean(values.float(), totals) for name, values in of_solutions.items()
    }


def first_true(values_K: Tensor, cu: Tensor) -> Tensor:
    """Return the index of the first true value within each segment, int64 `[B]`; -1 if there is none."""
    num_values = values_K.numel()
    places_K = torch.arange(num_values, device=values_K.device)
    none = torch.full((cu.numel() - 1,), num_values, device=values_K.device)
    marked_K = torch.where(values_K, places_K, num_values)
    first_B = none.scatter_reduce(0, segment_ids(cu, num_values), marked_K, "amin")
    return torch.where(first_B == num_values, -1, first_B - cu[:-1])


def finish_step_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Add F1 for both classes and the ProcessBench metrics (arXiv 2412.06559).

    Metrics that cover no step or solution are omitted.
    """
    helpers = (_CALLED_WRONG, _FOUND_WRONG, _FOUND_ERROR, _PASSED)
    wrong, called, found = (metrics[name] for name in (_WRONG, _CALLED_WRONG, _FOUND_WRONG))
    shares = {
        "wrong_f1": (2 * found, wrong + called),
        "right_f1": (2 * (metrics["accuracy"] - found), 2 - wrong - called),
        "error_accuracy": (metrics[_FOUND_ERROR], metrics[_ERRONEOUS]),
        "correct_accuracy": (metrics[_PASSED], 1 - metrics[_ERRONEOUS]),
    }
    # The denominators are float32 sums and differences of fractions: an absent class may leave a rounding residue.
    least = 1e-7
    finished = {name: part / whole for name, (part, whole) in shares.items() if whole > least}
    if {"error_accuracy", "correct_accuracy"} <= finished.keys():
        both = finished["error_accuracy"], finished["correct_accuracy"]
        finished["processbench_f1"] = 2 * both[0] * both[1] / sum(both) if sum(both) else 0.0
    return {name: value for name, value in metrics.items() if name not in helpers} | finished
