"""Gradients of an optimizer step, between the backward passes and the step."""

from collections.abc import Mapping

import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from rlhf_cli.algorithms.gradient_share import Projection


def full_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each trained parameter, summed over all ranks, in float32 in host memory.

    Call it on all ranks, after the last backward pass. With tensor parallelism, it is this rank's part.
    """
    found = {name: safe_get_full_grad(parameter) for name, parameter in _trained(module).items()}
    # None: no token reaches the parameter. Copied, because the optimizer step frees or changes gradients.
    return {
        name: gradient.to("cpu", torch.float32, copy=True) for name, gradient in found.items() if gradient is not None
    }


def projection(term: Tensor, module: nn.Module, gradients: Mapping[str, Tensor]) -> Projection:
    """Compare the gradient of a part of the loss with `full_gradients`. Keeps the graph of `term`.

    It does not change the gradients of the parameters.
    """
    trained = _trained(module)
    own = torch.autograd.grad(term, list(trained.values()), retain_graph=True, allow_unused=True)
    product = square = 0.0
    for name, gradient in zip(trained, own, strict=True):
        if gradient is not None and name in gradients:
            values = gradient.to("cpu", torch.float32)
            product += _dot(values, gradients[name])
            square += _dot(values, values)
    step_square = sum(_dot(values, values) for values in gradients.values())
    return Projection(product, square**0.5, step_square**0.5)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _dot(one: Tensor, other: Tensor) -> float:
    """Return the dot product, added in float64: it has as many terms as the model has weights."""
    return float((one * other).sum(dtype=torch.float64))
