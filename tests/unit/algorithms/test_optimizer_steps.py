"""AdamW and Muon steps, compared with PyTorch's optimizers and singular values in float64."""

from typing import Any

import pytest
import torch
from torch import nn

from rlhf_cli.algorithms.optimizer_steps import ITERATIONS, NEWTON_SCHULZ, adamw_step, muon_update, orthogonalized


def on_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Apply the polynomial to the singular values in float64 and keep the singular vectors."""
    a, b, c = NEWTON_SCHULZ
    u, values, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return (u * values) @ vt


@pytest.mark.parametrize("shape", [(6, 6), (3, 9), (9, 3), (1, 5), (5, 1)])
def test_singular_values_go_through_the_polynomial_and_their_vectors_stay(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonalized(matrix), on_singular_values(matrix).float(), rtol=1e-4, atol=1e-4)


def test_singular_values_come_near_one_whatever_the_scale():
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(2))
    for scale in (1e-3, 1.0, 1e4):
        values = torch.linalg.svdvals(orthogonalized(scale * matrix))
        assert 0.65 < values.min() <= values.max() < 1.25
    assert orthogonalized(torch.zeros(3, 4)).eq(0).all()


def test_a_stack_of_matrices_is_updated_one_by_one():
    stack = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3))
    together = muon_update(stack)
    for one, matrix in zip(together, stack, strict=True):
        torch.testing.assert_close(one, muon_update(matrix), rtol=1e-5, atol=1e-6)


def test_an_update_has_the_size_of_adamws():
    """A matrix with n singular values of 1 has mean square n / elements = 1 / max(rows, columns); some are 0.7."""
    update = muon_update(torch.randn(40, 100, generator=torch.Generator().manual_seed(4)))
    assert 0.65 * 0.2 < update.square().mean().sqrt().item() < 1.25 * 0.2


def test_steps_of_adamw_are_those_of_pytorch():
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    theirs = nn.Parameter(torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)))
    ours = theirs.detach().clone()
    first, second = torch.zeros_like(ours), torch.zeros_like(ours)
    reference = torch.optim.AdamW([theirs], **settings)
    for step in range(1, 4):
        theirs.grad = torch.sin(theirs.detach() * step)
        adamw_step(ours, torch.sin(ours * step), first, second, step=step, settings=settings)
        reference.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
