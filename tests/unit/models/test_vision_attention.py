"""Attention of vision towers: the kernel of each family, and its outputs compared with SDPA."""

from pathlib import Path

import pytest
import torch
from tiny_vision import TINY_FAMILIES, random_picture, save_tiny_vision
from vision_sequences import tiny_family, tower_inputs

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.models.attention.varlen import TOWER_VARLEN
from rlhf_cli.models.compat import attention_name
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.vision.attention import tower_kernel
from rlhf_cli.models.vision.families.table import FAMILIES


def features_and_gradients(folder: Path, attention: str) -> tuple[str | None, list[torch.Tensor]]:
    """Return the tower's kernel, its features of two images, and the gradients of a weighted sum."""
    model = load_causal_lm(ModelConfig(pretrain=str(folder), param_dtype="fp32", attn_implementation=attention))
    family = tiny_family(folder)
    sizes = [family.final_size(112, 84), family.final_size(60, 200)]
    inputs = tower_inputs(family, [random_picture(*size, seed=size[1]) for size in sizes])
    found = model.base_model.get_image_features(**inputs, return_dict=True).pooler_output
    features = torch.cat([part.flatten() for part in found])
    (features * torch.linspace(-1, 2, features.numel())).sum().backward()
    tower = model.get_submodule(FAMILIES[model.config.model_type].tower)
    grads = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
    return attention_name(tower.config), [features.detach(), *grads]


@pytest.mark.parametrize("kind", TINY_FAMILIES)
def test_features_and_gradients_of_a_tower_are_sdpas(tmp_path: Path, kind: str) -> None:
    folder = save_tiny_vision(kind, tmp_path / kind)
    own, found = features_and_gradients(folder, "varlen")
    plain, expected = features_and_gradients(folder, "sdpa")
    assert (own, plain) == (TOWER_VARLEN if "qwen" in kind else "sdpa", "sdpa")
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * max(other.abs().max().item(), 1), rtol=1e-4)


@pytest.mark.parametrize(
    ("decoder", "has_varlen", "of_bounds", "of_squares"),
    [
        ("varlen", True, TOWER_VARLEN, "sdpa"),
        ("flash_attention_2", False, "flash_attention_2", "flash_attention_2"),
        ("flash_attention_3", True, "flash_attention_3", "flash_attention_3"),
        ("flash_attention_4", True, TOWER_VARLEN, "sdpa"),
        ("flash_attention_4", False, "sdpa", "sdpa"),
        ("sdpa", True, "sdpa", "sdpa"),
        ("eager", True, "sdpa", "sdpa"),
    ],
)
def test_a_tower_takes_bounds_where_its_decoders_kernel_is_there(
    decoder: str, has_varlen: bool, of_bounds: str, of_squares: str
) -> None:
    for kind in FAMILIES:
        expected = of_bounds if "qwen" in kind else of_squares
        assert tower_kernel(decoder, kind, has_varlen=lambda: has_varlen) == expected
