"""Convert between in-memory and checkpoint weight names.

When transformers loads a model, it fuses the experts in a layer into one tensor and renames some modules. Files and
rollout engines use the original names and layout. Only this module calls the transformers conversion.
"""

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from rlhf_cli.models.weight_files import RenamedTensors, TensorSource


def as_in_checkpoint(
    model: PreTrainedModel, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield model tensors with checkpoint names and layout, one at a time.

    Tensors without fused weights pass through unchanged. Results may share memory with the input, which may be reused
    after the next one is requested.
    """
    for name, tensor in named:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def forget_unused_prefixes(model: PreTrainedModel) -> None:
    """Drop changes of prefixes that changed no name when the model was loaded.

    Under ZeRO-3, transformers keeps them, and saving would revert them: text models would get the names that they have
    within vision-language models.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        used = [one for one in conversions if not isinstance(one, PrefixChange) or one.was_used()]
        model._weight_conversions = used


def shapes_in_checkpoint(
    model: PreTrainedModel, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Return checkpoint names and shapes for one model tensor, without data."""
    # The conversion accepts meta tensors, which have shapes but no memory.
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return {stored: tuple(part.shape) for stored, part in as_in_checkpoint(model, [(name, empty)])}


def copy_from_checkpoint(model: PreTrainedModel, own: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """Copy checkpoint tensors into model tensors in place.

    If the conversion copies data, converting an index tensor gives the position of each value.
    """
    for name, tensor in own.items():
        parts = dict(as_in_checkpoint(model, [(name, tensor)]))
        # Converted parts that are views of the tensor can be written directly.
        if all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts.values()):
            for part_name, part in parts.items():
                part.copy_(stored[part_name])
            continue
        # The conversion may transpose or concatenate; only positions show where each value ends up.
        positions = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        for part_name, places in as_in_checkpoint(model, [(name, positions)]):
            tensor.put_(places, stored[part_name].to(tensor.device, tensor.dtype))


def persistent_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return buffers that checkpoints store in addition to parameters, such as DeepSeek-V3 router biases."""
    stored = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def in_memory_names(stored: TensorSource, model: PreTrainedModel) -> RenamedTensors:
    """Return checkpoint tensors under their in-memory names, for models without fused tensors."""
    own = {
        in_file: name
        for name, tensor in model.state_dict().items()
        for in_file in shapes_in_checkpoint(model, name, tuple(tensor.shape), tensor.dtype)
    }
    return RenamedTensors(stored, lambda name: own.get(name, name))


class CheckpointTensors:
    """A source with in-memory names, presented with checkpoint names.

    The last source tensor is cached, because its fused experts are read one after another.
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
