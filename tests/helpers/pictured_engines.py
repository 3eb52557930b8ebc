"""Rollout engines with tiny vision-language models: requests with images, and trainer log-probs for responses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from samples import sample_of
from tiny_vision import random_picture
from vision_sequences import MIXED, tiny_family, vision_sequences

from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.models.checkpoint_names import as_in_checkpoint, persistent_buffers
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.vision.pictures import picture_of_pixels
from rlhf_cli.models.vision.tower import tower_modules

SAMPLING = SamplingParams(max_new_tokens=16)


def pictured_requests(folder: Path, samples: int = 2) -> list[GenerationRequest]:
    """Return samples for prompts with no, one and two images, and for the first prompt with another image."""
    requests = []
    for sequence in vision_sequences(folder, MIXED[:3]):
        prompt_ids = sequence.token_ids[~sequence.loss_mask].tolist()
        requests += [GenerationRequest(prompt_ids, seed, pictures=sequence.pictures) for seed in range(samples)]
    (placed,) = requests[0].pictures
    pixels = random_picture(placed.picture.height, placed.picture.width, seed=99)
    other = (replace(placed, picture=picture_of_pixels("other", pixels)),)
    return [*requests, *(replace(request, pictures=other) for request in requests[:samples])]


def name_tower_as_on_the_hub(folder: Path) -> None:
    """Rename LLaVA's vision encoder tensors to the Hub's names, which transformers 5 changes for new models."""
    file = folder / "model.safetensors"
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def trainer_of(folder: Path) -> PolicyModel:
    """Return the model as used in training."""
    return PolicyModel(load_causal_lm(ModelConfig(pretrain=str(folder), param_dtype="fp32")))


@torch.no_grad()
def largest_difference(
    trainer: PolicyModel, requests: Sequence[GenerationRequest], generations: Sequence[Generation]
) -> float:
    """Return the maximum difference between engine and trainer log-probs."""
    sequences = [
        sample_of(Prompt(request.prompt_ids, "", None, "", 0, pictures=request.pictures), generation).sequence
        for request, generation in zip(requests, generations, strict=True)
    ]
    found = torch.tensor([logprob for generation in generations for logprob in generation.logprobs])
    return float((trainer(pack(sequences))[0] - found).abs().max())


@torch.no_grad()
def change_tower(trainer: PolicyModel) -> None:
    """Change only the vision encoder and projector."""
    torch.manual_seed(7)
    for module in tower_modules(trainer.model):
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@torch.no_grad()
def prefer_placeholders(trainer: PolicyModel, folder: Path) -> None:
    """Bias the model to sample image placeholders at about half of the positions."""
    trainer.model.get_output_embeddings().weight[tiny_family(folder).image_token] *= 60


def sent_weights(trainer: PolicyModel, sender: WeightSender, version: int) -> dict[str, object]:
    """Return the manifest of a push with the trainer's weights."""
    named = [*trainer.model.named_parameters(), *persistent_buffers(trainer.model)]
    manifest = sender.send(as_in_checkpoint(trainer.model, named), version).manifest
    assert manifest is not None
    return manifest


def shm_sender() -> WeightSender:
    """Return a shared-memory sender."""
    return WeightSender(ShmTransport())
