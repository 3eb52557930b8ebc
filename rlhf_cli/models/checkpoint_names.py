"""Weights under the names of checkpoints.

transformers joins the experts of a layer into one tensor and renames some modules when it loads a model. Files and
rollout engines know the names and the layout from before. The one place that calls transformers' conversion.
"""

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_cli.models.weight_files import RenamedTensors, TensorSource


def as_in_checkpoint(
    model: PreTrainedModel, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the model under the names and in the layout of its checkpoint, one after another.

    Tensors of models without joined weights are yielded as they come. Others may share memory with the tensor given,
    which need not be valid any longer when the next one is taken.
    """
    for name, tensor in named:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def shapes_in_checkpoint(
    model: PreTrainedModel, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in the checkpoint of one tensor of the model, without its data."""
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return {stored: tuple(part.shape) for stored, part in as_in_checkpoint(model, [(name, empty)])}


def copy_from_checkpoint(model: PreTrainedModel, own: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """Copy tensors of a checkpoint into the model's own tensors in place.

    If the conversion of a tensor copies its parts, the conversion of its positions gives the place of each number.
    """
    for name, tensor in own.items():
        parts = dict(as_in_checkpoint(model, [(name, tensor)]))
        if all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts.values()):
            for part_name, part in parts.items():
                part.copy_(stored[part_name])
            continue
        positions = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        for part_name, places in as_in_checkpoint(model, [(name, positions)]):
            tensor.put_(places, stored[part_name].to(tensor.device, tensor.dtype))


def persistent_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that checkpoints have beside the parameters, such as the routers' biases of DeepSeek-V3."""
    stored = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def in_memory_names(stored: TensorSource, model: PreTrainedModel) -> RenamedTensors:
    """Return the tensors of a checkpoint under the names that they have in the model, which joins none of them."""
    own = {
        in_file: name
        for name, tensor in model.state_dict().items()
        for in_file in shapes_in_checkpoint(model, name, tuple(tensor.shape), tensor.dtype)
    }
    return RenamedTensors(stored, lambda name: own.get(name, name))


class CheckpointTensors:
    """The tensors of a source, which have the model's own names, as its checkpoint has them.

    One tensor of the source is kept, because the experts that are joined in it are read one after another.
    """

    def __init__(self, source: TensorSource, model: PreTrainedModel) -> None:
        self._source = source
        self._model = model
        self._own_name: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for own in source.names():
            shapes = shapes_in_checkpoint(model, own, source.shape(own), source.dtype(own))
            self._own_name |= dict.fromkeys(shapes, own)
            self._shapes |= shapes
        self._kept: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def names(self) -> list[str]:
        return list(self._own_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._own_name[name])

    def read(self, name: str) -> torch.Tensor:
        own = self._own_name[name]
        if self._kept[0] != own:
            self._kept = (own, dict(as_in_checkpoint(self._model, [(own, self._source.read(own))])))
        return self._kept[1][name]
