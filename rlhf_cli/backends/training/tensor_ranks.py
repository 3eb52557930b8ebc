"""Ranks that split the layers of a trained model: what DeepSpeed's AutoTP is given, and split weights made whole."""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.models.tensor_parallel import split_dimension, split_layers


def tensor_parallel_config(module: nn.Module, size: int) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that splits the model in a module over so many ranks, if any."""
    if size == 1:
        return {}
    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    layers = {"use_default_specs": False, "layer_specs": split_layers(model.config)}
    return {"tensor_parallel": {"autotp_size": size, "partition_config": layers}}


@torch.no_grad()
def joined(parameter: nn.Parameter) -> torch.Tensor:
    """Return the whole of a parameter that is not partitioned but may be split; then every rank must call it."""
    own, dimension = parameter.detach(), split_dimension(parameter)
    if dimension is None:
        return own
    group = groups.get_tensor_model_parallel_group()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=dimension)
