"""Run the operations of mixers that combine tokens on each run of a pack.

Projections, gates and norms of a mixer compute on the flat pack. Its module in transformers calls the convolution by
name, so a wrapper takes its place there and inserts the tokens that each run continues. The bounds that transformers
can pass are not enough: its PyTorch functions ignore them without an error, and so do kernels under another name.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.errors import RunError
from rlhf_cli.models.attention.varlen import SelectTokens
from rlhf_cli.models.mixers.layers import MIXERS, kind_of
from rlhf_cli.models.mixers.runs import MixerRuns

RUNS = "mixer_runs"
"""Argument under which decoders pass the runs to their layers."""
Operation = Callable[..., torch.Tensor]
Arguments = tuple[object, ...]
PACKED = "is_packed"
"""Attribute of functions that are wrapped already."""
_current: ContextVar[MixerRuns | None] = ContextVar("runs of the pack in a layer", default=None)


def bind_mixers(decoder: PreTrainedModel) -> bool:
    """Let the mixers in a decoder see the runs that its layers receive as `mixer_runs`. Returns whether it has any."""
    mixers = {type(part) for part in decoder.modules() if kind_of(type(part)) in MIXERS}
    for cls in mixers:
        _wrap(cls, "causal_conv1d_fn", packed_convolution)
    if mixers:
        for layer in decoder.layers:
            # The wrapped functions serve all models in this process, engines too, so runs are set only within a layer:
            # always_call includes a recomputation, which PyTorch stops early with an exception.
            layer.register_forward_pre_hook(_enter, with_kwargs=True)
            layer.register_forward_hook(_leave, always_call=True)
    return bool(mixers)


def _enter(layer: nn.Module, args: Arguments, kwargs: dict[str, object]) -> tuple[Arguments, dict[str, object]]:
    # Checkpointed layers are recomputed with the same arguments, possibly in another thread.
    if RUNS in kwargs:
        runs = kwargs.pop(RUNS)
        assert isinstance(runs, MixerRuns)
        _current.set(runs)
    return args, kwargs


def _leave(layer: nn.Module, args: Arguments, output: object) -> None:
    _current.set(None)


def _wrap(cls: type[nn.Module], name: str, wrapper: Callable[[Operation], Operation]) -> None:
    """Replace a function in the module of a mixer. Raises RunError if another version of transformers lacks it."""
    module = sys.modules[cls.__module__]
    plain = getattr(module, name, None)
    if plain is None:
        raise RunError(f"{cls.__name__} cannot be packed: this version of transformers has no {name} in its module")
    if not hasattr(plain, PACKED):
        wrapped = functools.wraps(plain)(wrapper(plain))
        setattr(wrapped, PACKED, True)
        setattr(module, name, wrapped)


def _for_device(plain: Operation, tensor: torch.Tensor) -> Operation:
    # transformers binds installed GPU kernels at import, also for tensors on a CPU, where they fail.
    return plain if tensor.is_cuda else inspect.unwrap(plain)


def packed_convolution(plain: Operation) -> Operation:
    """Wrap `causal_conv1d_fn`, which convolves channels first [1, C, T]."""

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        function, runs = _for_device(plain, hidden_states), _current.get()
        if runs is None:
            return function(hidden_states, weight, bias, activation=activation, **kwargs)
        context_S, own_T = runs.context(weight.shape[-1] - 1)
        # Row T of zeros is the context of runs that start a sequence.
        tokens_TC = nn.functional.pad(hidden_states[0].transpose(0, 1), (0, 0, 0, 1))
        # The end of a prompt is selected once per response: gradients add up in float32.
        spread_CS = SelectTokens.apply(tokens_TC, context_S).transpose(0, 1)
        convolved = function(spread_CS[None], weight, bias, activation=activation)
        return convolved.index_select(-1, own_T)

    return convolve
