"""Gradients of an optimizer step, between the backward passes and the step."""

from collections.abc import Mapping

import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from rlhf_cli.algorithms.gradient_share import Projection, compared


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
    named = zip(trained, own, strict=True)
    return compared({name: one.to("cpu", torch.float32) for name, one in named if one is not None}, gradients)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
