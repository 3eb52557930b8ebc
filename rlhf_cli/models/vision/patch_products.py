"""The first layer of a tower as a matrix product: convolutions whose windows lie side by side.

PyTorch's convolutions take many times as long for it on a CPU, most of all in the backward pass.
"""

from functools import partial

import torch
from torch import nn


def use_patch_products(tower: nn.Module) -> None:
    """Let all layers of a tower that cut patches compute products; their weights and names stay."""
    for layer in tower.modules():
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)) and cuts_patches(layer):
            layer.forward = partial(patch_product, layer)


def cuts_patches(layer: nn.Conv2d | nn.Conv3d) -> bool:
    """Return whether each pixel of a picture is in at most one window of the layer, and nothing is added around it."""
    return (
        layer.kernel_size == layer.stride
        and layer.padding in ("valid", (0,) * len(layer.kernel_size))
        and layer.groups == 1
        and set(layer.dilation) == {1}
    )


def patch_product(layer: nn.Conv2d | nn.Conv3d, pixels: torch.Tensor) -> torch.Tensor:
    """Return the layer's output [N, D, *grid] for pixels [N, C, *sizes]; those behind the last window are not read."""
    num_axes = len(layer.kernel_size)
    for axis, size in enumerate(layer.kernel_size, start=2):
        pixels = pixels.unfold(axis, size, size)
    patches = pixels.movedim(1, 1 + num_axes).flatten(1 + num_axes)
    return nn.functional.linear(patches, layer.weight.flatten(1), layer.bias).movedim(-1, 1)
