"""Prompts with pictures as a transformers model prefills them: by the trainer's own features and positions, padded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.rollouts import GenerationRequest
from rlhf_cli.models.vision.tower import VisionTower


def prefill_inputs(tower: VisionTower, prompts: Sequence[GenerationRequest], mask_BW: torch.Tensor) -> dict[str, Any]:
    """Return the decoder's arguments for prompts, each a row of width W; `mask_BW` is false for padding.

    Padding has embeddings and positions of zero.
    """
    sequences = [
        TokenSequence(np.array(prompt.prompt_ids, np.int32), np.zeros(len(prompt.prompt_ids), bool), prompt.pictures)
        for prompt in prompts
    ]
    inputs: dict[str, Any] = tower.decoder_inputs(pack(sequences).to(mask_BW.device))
    embedded_BWD = _padded(inputs.pop("inputs_embeds").movedim(-1, 0), mask_BW).movedim(0, -1)
    others = {name: _padded(value, mask_BW) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return {**inputs, "inputs_embeds": embedded_BWD, **others}


def _padded(values: torch.Tensor, mask_BW: torch.Tensor) -> torch.Tensor:
    """Return values [..., 1, T] of a pack as [..., B, W]."""
    padded = values.new_zeros(*values.shape[:-2], *mask_BW.shape)
    padded[..., mask_BW] = values[..., 0, :]
    return padded
