"""Sequences with images for tiny vision-language models, and log-probs of plain models for them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_vision import random_picture
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.models.vision.families.table import TokenisedFamily, find_family
from rlhf_cli.models.vision.family import VisionFamily
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels

MIXED = [[(56, 84)], [], [(112, 56), (60, 60)], [], [(30, 90)]]
"""Image sizes of five sequences, two of them with only text."""


def tiny_family(folder: Path) -> VisionFamily:
    family = find_family(str(folder), AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    assert family is not None
    return family


def tower_inputs(family: VisionFamily, pictures: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return `get_image_features` arguments for images in their final sizes."""
    assert isinstance(family, TokenisedFamily)
    return family.processing.joined([family.processing.inputs_of(pixels) for pixels in pictures])


def vision_sequences(folder: Path, sizes: Sequence[Sequence[tuple[int, int]]] = MIXED) -> list[TokenSequence]:
    """Return one sequence per list of sizes: images between bytes, then a response with a distinct number of bytes.
    Images with equal size are equal.
    """
    family, tokenizer = tiny_family(folder), AutoTokenizer.from_pretrained(folder)
    return [_sequence(family, tokenizer, number, its) for number, its in enumerate(sizes)]


def _sequence(family: VisionFamily, tokenizer: Any, number: int, sizes: Sequence[tuple[int, int]]) -> TokenSequence:
    token_ids: list[int] = tokenizer(f"<|im_start|>user\n{number}", add_special_tokens=False)["input_ids"]
    placed = []
    for size in sizes:
        height, width = family.final_size(*size)
        run = family.run(height, width)
        picture = picture_of_pixels(f"{height} {width}", random_picture(height, width, seed=height + width))
        placed.append(PlacedPicture(picture, len(token_ids), len(run.token_ids), family.image_token, run.grid))
        token_ids = [*token_ids, *run.token_ids, number]
    answer = tokenizer("because " * (1 + number % 2) + f"{number}<|im_end|>", add_special_tokens=False)["input_ids"]
    ids = np.array(token_ids + answer, dtype=np.int32)
    return TokenSequence(ids, np.arange(ids.size) >= len(token_ids), tuple(placed))


def plain_logprobs(folder: Path, sequences: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.nn.Module]:
    """Return log-probs [K] from transformers, one sequence at a time, and the model."""
    model, logits_of = AutoModelForImageTextToText.from_pretrained(folder), plain_logits(folder)
    found = []
    for sequence in sequences:
        targets = sequence.token_ids[np.flatnonzero(sequence.loss_mask)]
        found.append(logits_of(model, sequence).log_softmax(-1)[np.arange(targets.size), targets])
    return torch.cat(found), model


def plain_logits(folder: Path) -> Callable[[torch.nn.Module, TokenSequence], torch.Tensor]:
    """Return a function that computes logits [K, V] for a sequence's trained tokens with transformers."""
    family = tiny_family(folder)

    def logits(model: torch.nn.Module, sequence: TokenSequence) -> torch.Tensor:
        found: torch.Tensor = model(**_plain_inputs(family, sequence)).logits[0]
        return found[np.flatnonzero(sequence.loss_mask) - 1]

    return logits


def plain_scores(folder: Path, sequences: Sequence[TokenSequence], head: torch.Tensor) -> torch.Tensor:
    """Return the products of the head and transformers' last hidden states, one sequence at a time."""
    model, family = AutoModelForImageTextToText.from_pretrained(folder), tiny_family(folder)
    with torch.no_grad():
        states = [model.base_model(**_plain_inputs(family, one)).last_hidden_state[0, -1] for one in sequences]
    return torch.stack([state_D @ head[0] for state_D in states])


def _plain_inputs(family: VisionFamily, sequence: TokenSequence) -> dict[str, Any]:
    """Return a sequence's inputs for transformers models."""
    ids_1L = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
    inputs: dict[str, Any] = {"input_ids": ids_1L}
    if sequence.pictures:
        inputs |= tower_inputs(family, [placed.picture.pixels for placed in sequence.pictures])
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids_1L == family.image_token).int()
    return inputs
