"""Patch embedding as a matrix product, for convolutions with non-overlapping windows.

PyTorch convolutions are many times slower for this on a CPU, especially in the backward pass.
"""

from functools import partial

import torch
from torch import nn


def use_patch_products(tower: nn.Module) -> None:
    """Compute all patch embeddings in an encoder as matrix products. Weights and names do not change."""
    for layer in tower.modules():
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)) and cuts_patches(layer):
            # On the instance: the layer's class, parameters and state dict names stay the same.
            layer.forward = partial(patch_product, layer)


def cuts_patches(layer: nn.Conv2d | nn.Conv3d) -> bool:
    """Return whether the layer's windows do not overlap and it adds no padding."""
    return (
        layer.kernel_size == layer.stride
        and layer.padding in ("valid", (0,) * len(layer.kernel_size))
        and layer.groups == 1
        and set(layer.dilation) == {1}
    )


def patch_product(layer: nn.Conv2d | nn.Conv3d, pixels: torch.Tensor) -> torch.Tensor:
    """Compute the layer output [N, D, *grid] for pixels [N, C, *sizes]; pixels after the last window are ignored."""
    num_axes = len(layer.kernel_size)
    for axis, size in enumerate(layer.kernel_size, start=2):
        # unfold returns a view; flatten below makes the only copy.
        pixels = pixels.unfold(axis, size, size)
    patches = pixels.movedim(1, 1 + num_axes).flatten(1 + num_axes)
    return nn.functional.linear(patches, layer.weight.flatten(1), layer.bias).movedim(-1, 1)
