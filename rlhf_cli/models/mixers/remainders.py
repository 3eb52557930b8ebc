"""Parameters of mixers that model files store in float32, in a model of another dtype.

Files store decays and time steps of recurrent layers in float32, and rounding them changes every token. DeepSpeed casts
every parameter to the run's dtype, so each of these keeps its remainder: what the cast leaves out. Layers, pushes and
saved models use the sum in float32. Training updates the parameter, like all others.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.models.checkpoint_names import shapes_in_checkpoint
from rlhf_cli.models.mixers.layers import MIXERS, kind_of
from rlhf_cli.models.tensor_parallel import whole_shape
from rlhf_cli.models.weight_files import TensorSource, folder_of, open_weights

VECTORS = frozenset({"A_log", "D", "dt_bias"})
GATED_NORM = "NormGated"
"""In the class names of the norms in mixers, which compute in float32."""
FILE = "remainders.safetensors"
"""File next to a saved engine, whose weights are those that training updates."""
REMAINDERS = "remainders"
"""Attribute of a module with the remainders of its parameters, by parameter name."""


def keep_float32(model: PreTrainedModel, path: str) -> None:
    """Keep the remainders of the mixers' parameters that are float32 in the model's files, but not in the model."""
    in_files = _in_files(model)
    if not in_files:
        return
    weights = open_weights(folder_of(path))
    names = set(weights.names())
    for name, in_file in in_files.items():
        if in_file in names and weights.dtype(in_file) == torch.float32:
            _keep(model, name, weights.read(in_file))


def _keep(model: PreTrainedModel, name: str, value: torch.Tensor) -> None:
    """Keep what a parameter, cast from this float32 value to the model's dtype, leaves out."""
    path, _, leaf = name.rpartition(".")
    module, dtype = model.get_submodule(path), model.dtype
    parameter = module._parameters[leaf]
    assert parameter is not None
    # Some classes create decays in float32 whatever the model's dtype. Partitioned ones have it already.
    if parameter.dtype != dtype:
        parameter.data = parameter.data.to(dtype)
    if not hasattr(module, REMAINDERS):
        cls: Any = type(module)
        module.__class__ = _with_sums(cls)
        setattr(module, REMAINDERS, {})
    getattr(module, REMAINDERS)[leaf] = value.float() - value.to(dtype).float()


def remainders(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all remainders of a model, by parameter name."""
    return {
        f"{path}.{leaf}": remainder
        for path, module in model.named_modules()
        for leaf, remainder in getattr(module, REMAINDERS, {}).items()
    }


def with_remainders(model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's full tensors, those with a remainder as sums in float32."""
    kept = remainders(model)
    for name, tensor in named:
        yield name, _sum(tensor, kept[name]) if name in kept else tensor


def take_remainders(model: PreTrainedModel, pushed: dict[str, torch.Tensor]) -> None:
    """Take the remainders of a push, whose tensors have the names in files."""
    in_files = _in_files(model)
    for name in remainders(model):
        _keep(model, name, pushed[in_files[name]])


def save_remainders(model: nn.Module, folder: Path) -> None:
    """Write a model's remainders, if any, to a folder that describes it."""
    if kept := remainders(model):
        save_file({name: remainder.cpu() for name, remainder in kept.items()}, folder / FILE)


class SummedTensors:
    """A source of a model's tensors, those with a remainder in a folder as sums in float32."""

    def __init__(self, source: TensorSource, folder: Path) -> None:
        self._source = source
        self._kept = load_file(folder / FILE) if (folder / FILE).is_file() else {}

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._kept else self._source.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        return _sum(tensor, self._kept[name]) if name in self._kept else tensor


def _in_files(model: PreTrainedModel) -> dict[str, str]:
    """Return parameters of a model in another dtype that files may store in float32, with their names in files."""
    if model.dtype == torch.float32:
        return {}
    mixers = tuple(f"{name}." for name, part in model.named_modules() if kind_of(type(part)) in MIXERS)
    found = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        is_gated_norm = GATED_NORM in type(model.get_submodule(path)).__name__
        if name.startswith(mixers) and (leaf in VECTORS or is_gated_norm):
            (found[name],) = shapes_in_checkpoint(model, name, whole_shape(parameter), parameter.dtype)
    return found


def _sum(tensor: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    return tensor.float() + remainder.to(tensor.device).view(tensor.shape)


@functools.cache
def _with_sums(cls: Any) -> Any:
    """Return a class whose parameters are read with their remainders. Their names and dtypes remain the same."""

    def read(module: Any, name: str) -> Any:
        found = cls.__getattr__(module, name)
        kept = module.__dict__.get(REMAINDERS, {})
        if name not in kept:
            return found
        # Copied to the device of the parameter once.
        kept[name] = kept[name].to(found.device)
        return _sum(found, kept[name])

    # Mixers are found by class name, and wrapped in the module of their class.
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__getattr__": read})
