"""Prefill inputs for prompts with images, built from the trainer's image features and positions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.rollouts import GenerationRequest
from rlhf_cli.models.vision.tower import VisionTower


def prefill_inputs(tower: VisionTower, prompts: Sequence[GenerationRequest], mask_BW: torch.Tensor) -> dict[str, Any]:
    """Build the decoder arguments for prompts padded to width W; `mask_BW` is false for padding.

    Padding has zero embeddings and positions.
    """
    # Through the trainer's packing code, so that prefill uses exactly the features and positions seen in training.
    sequences = [
        TokenSequence(np.array(prompt.prompt_ids, np.int32), np.zeros(len(prompt.prompt_ids), bool), prompt.pictures)
        for prompt in prompts
    ]
    inputs: dict[str, Any] = tower.decoder_inputs(pack(sequences).to(mask_BW.device))
    embedded_BWD = _padded(inputs.pop("inputs_embeds").movedim(-1, 0), mask_BW).movedim(0, -1)
    padded = {name: _padded(value, mask_BW) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return {**inputs, "inputs_embeds": embedded_BWD, **padded}


def _padded(values: torch.Tensor, mask_BW: torch.Tensor) -> torch.Tensor:
    """Convert packed values [..., 1, T] to padded rows [..., B, W]."""
    padded = values.new_zeros(*values.shape[:-2], *mask_BW.shape)
    padded[..., mask_BW] = values[..., 0, :]
    return padded
