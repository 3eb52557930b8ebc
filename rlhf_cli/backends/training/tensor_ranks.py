"""Tensor parallelism with DeepSpeed's AutoTP: configuration, and gathering of full weights."""

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.models.tensor_parallel import split_dimension, split_layers


def tensor_parallel_config(module: nn.Module, size: int) -> dict[str, object]:
    """Return the DeepSpeed config entries that split the model over `size` ranks; {} for one rank."""
    if size == 1:
        return {}
    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    layers = {"use_default_specs": False, "layer_specs": split_layers(model.config)}
    return {"tensor_parallel": {"autotp_size": size, "partition_config": layers}}


@torch.no_grad()
def joined(parameter: nn.Parameter) -> torch.Tensor:
    """Return a full parameter. If it is split, it is gathered, so call it on all ranks."""
    own, dimension = parameter.detach(), split_dimension(parameter)
    if dimension is None:
        return own
    group = groups.get_tensor_model_parallel_group()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=dimension)
