"""Files of a trained model, written by its ranks in Hugging Face format."""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.backends.training.deepspeed_weights import DESCRIPTION
from rlhf_cli.models.adapters import describe_adapter, is_adapted, save_adapter
from rlhf_cli.models.checkpoint_names import persistent_buffers
from rlhf_cli.models.saving import save_all_but_weights, save_hf
from rlhf_cli.models.vision.freezing import describe_frozen_parts


def save_whole_model(engine: DeepSpeedEngine, hf_model: object, tokenizer: object, directory: Path) -> None:
    """Save the model, or only its adapter, in Hugging Face format, on rank 0. Call it on all ranks."""
    save_weights(engine.named_weights(hf_model, only_trained=is_adapted(hf_model)), hf_model, tokenizer, directory)


def save_weights(
    named: Iterable[tuple[str, torch.Tensor]], hf_model: object, tokenizer: object, directory: Path
) -> None:
    """Save these weights of the model or adapter, on rank 0. Call it on all ranks."""
    is_writer = dist.get_rank() == 0
    # All ranks iterate, because gathering is a collective. A gathered tensor is valid only until the next one.
    weights = {name: weight.to("cpu", copy=True) for name, weight in named if is_writer}
    if is_writer:
        if not is_adapted(hf_model):
            weights |= {name: buffer.cpu() for name, buffer in persistent_buffers(hf_model)}
        save = save_adapter if is_adapted(hf_model) else save_hf
        save(hf_model, tokenizer, directory, state_dict=weights)
    # No rank may continue before the files exist.
    distributed.barrier()


def describe_model(hf_model: object, tokenizer: object, directory: Path) -> None:
    """Save the files, next to a saved engine, with which `rlhf merge` makes a Hugging Face folder of it, on rank 0."""
    if dist.get_rank() == 0:
        folder = directory / DESCRIPTION
        folder.mkdir(exist_ok=True)
        save_all_but_weights(hf_model, tokenizer, folder)
        if is_adapted(hf_model):
            describe_adapter(hf_model, folder)
        describe_frozen_parts(hf_model, folder)
