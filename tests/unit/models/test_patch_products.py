"""The patch embedding of a vision tower as a matrix product instead of a convolution."""

from typing import Any

import pytest
import torch
from tiny_vision import TINY_FAMILIES, save_tiny_vision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vision_sequences import MIXED, vision_sequences

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.vision.patch_products import cuts_patches, patch_product, use_patch_products

LAYERS = [
    (nn.Conv2d(3, 5, kernel_size=4, stride=4, bias=False), (2, 3, 12, 9)),  # one column of pixels is unused
    (nn.Conv2d(3, 5, kernel_size=(2, 3), stride=(2, 3), padding="valid"), (1, 3, 6, 6)),
    (nn.Conv3d(3, 5, kernel_size=(2, 4, 4), stride=(2, 4, 4)), (7, 3, 2, 4, 4)),
    (nn.Conv3d(3, 5, kernel_size=(1, 2, 2), stride=(1, 2, 2)), (2, 3, 4, 6, 4)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_a_product_is_the_convolution_in_value_and_gradients(layer, shape):
    assert cuts_patches(layer)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    inputs = [pixels, *layer.parameters()]
    expected, found = layer(pixels), patch_product(layer, pixels)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    weights = torch.arange(expected.numel()).reshape(expected.shape) / expected.numel()
    gradients = (torch.autograd.grad((output * weights).sum(), inputs) for output in (expected, found))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 6, kernel_size=4, stride=2),
        nn.Conv2d(3, 6, kernel_size=4, stride=4, padding=1),
        nn.Conv2d(3, 6, kernel_size=4, stride=4, groups=3),
        nn.Conv2d(3, 6, kernel_size=2, stride=2, dilation=2),
    ],
)
def test_windows_that_overlap_or_reach_beyond_the_picture_stay_a_convolution(layer):
    use_patch_products(nn.Sequential(layer))
    assert not cuts_patches(layer)
    assert "forward" not in vars(layer)


# Gated delta nets in the decoder of Qwen3.5 begin with one.
@pytest.mark.parametrize("kind", [kind for kind in TINY_FAMILIES if "qwen3_5" not in kind])
def test_no_family_runs_a_convolution(kind, tmp_path):
    folder = save_tiny_vision(kind, tmp_path)
    model = PolicyModel(load_causal_lm(ModelConfig(pretrain=str(folder), param_dtype="fp32")))
    names: set[str] = set()

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(str(function))
            return function(*args, **(kwargs or {}))

    with Recording():
        model(pack(vision_sequences(folder, MIXED[:1])))[0].sum().backward()
    assert any("mm" in name for name in names)
    assert not [name for name in names if "convolution" in name]
