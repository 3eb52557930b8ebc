"""Run the operations of mixers that combine tokens on each run of a pack.

Projections, gates and norms of a mixer compute on the flat pack. Its module in transformers calls convolution and scan
by name, so wrappers take their places there. The convolution gets the tokens that each run continues, the scan gets
runs as rows. The bounds that transformers can pass are not enough: its PyTorch functions ignore them without an error,
and so do kernels under another name.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Set
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.errors import RunError
from rlhf_cli.models.attention.varlen import SelectTokens
from rlhf_cli.models.mixers.layers import MIXERS, kind_of
from rlhf_cli.models.mixers.lightning import lightning_forward, lightning_scan
from rlhf_cli.models.mixers.runs import MixerRuns

RUNS = "mixer_runs"
"""Argument under which decoders pass the runs to their layers."""
Operation = Callable[..., Any]
Arguments = tuple[object, ...]


@dataclass(frozen=True)
class Scan:
    """A function that scans tokens with a recurrent state, and names of its arguments.

    - `tokens`: arguments [rows, length, ...]. Zeros in all of them leave a zero state at zero.
    - `begin`: states [rows, ...] to begin with; None if it has none such.
    - `end`: whether to return final states.
    - `returns_pair`: whether it returns a pair also without final states.
    - `channels_first`: whether tokens and output are [rows, channels, length].
    - `kernel`: function of a package that takes bounds of sequences, on a GPU.
    - `bounds`: argument of the kernel for them: ends, or the number of each token's sequence.
    """

    function: str
    tokens: frozenset[str]
    begin: str | None
    end: str
    returns_pair: bool
    channels_first: bool = False
    kernel: str = ""
    bounds: str = "cu_seqlens"


_OF_DELTA_RULES = frozenset({"query", "key", "value", "g", "beta"}), "initial_state", "output_final_state", True
LIGHTNING = Scan("lightning_scan", frozenset({"query", "key", "value"}), "initial_state", "output_final_state", True)
SCANS = {
    "gated delta net": Scan(
        "torch_chunk_gated_delta_rule", *_OF_DELTA_RULES, kernel="fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    ),
    "Kimi delta attention": Scan("chunk_kimi_delta_attention", *_OF_DELTA_RULES, kernel="fla.ops.kda.chunk_kda"),
    "Mamba 1": Scan(
        "mamba_selective_scan",
        frozenset({"hidden_states", "dt", "B", "C", "z"}),
        None,
        "return_last_state",
        returns_pair=False,
        channels_first=True,
    ),
    "Mamba 2": Scan(
        "mamba2_chunk_scan",
        frozenset({"hidden_states", "dt", "B", "C"}),
        "initial_states",
        "return_final_states",
        returns_pair=False,
        kernel="mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined",
        bounds="seq_idx",
    ),
}
"""Scans by the name of the mixer."""
DECODING = (
    "causal_conv1d_update",
    "mamba2_selective_state_update",
    "mamba_selective_state_update",
    "recurrent_kimi_delta_attention",
    "torch_recurrent_gated_delta_rule",
)
"""Functions for single tokens, which have no runs."""
PACKED = "is_packed"
"""Attribute of functions that are wrapped already."""
_current: ContextVar[MixerRuns | None] = ContextVar("runs of the pack in a layer", default=None)


def bind_mixers(decoder: PreTrainedModel) -> bool:
    """Let the mixers in a decoder see the runs that its layers receive as `mixer_runs`. Returns whether it has any."""
    has_mixers = wrap_operations(decoder)
    if has_mixers:
        for layer in decoder.layers:
            # The wrapped functions serve all models in this process, engines too, so runs are set only within a layer:
            # always_call includes a recomputation, which PyTorch stops early with an exception.
            layer.register_forward_pre_hook(_enter, with_kwargs=True)
            layer.register_forward_hook(_leave, always_call=True)
    return has_mixers


def wrap_operations(decoder: PreTrainedModel) -> bool:
    """Wrap the operations of a decoder's mixers. Returns whether it has any."""
    mixers = [(part, kind) for part in decoder.modules() if (kind := kind_of(type(part))) in MIXERS]
    for part, kind in mixers:
        if kind == "RG-LRU":
            # It calls its convolution as a module, and its recurrence starts anew at position 0.
            _wrap_forward(part.conv_1d, functools.partial(packed_module, count=part.conv1d_width - 1))
        elif kind == "lightning attention":
            _wrap_forward(part, functools.partial(packed_lightning, layer=part))
        else:
            _wrap_functions(type(part), kind)
    return bool(mixers)


def _wrap_functions(cls: type[nn.Module], kind: str | None) -> None:
    """Wrap the functions that a mixer calls. Raises RunError if they are not those of the supported releases."""
    _wrap(cls, "causal_conv1d_fn", {"weight", "bias", "activation"}, packed_convolution)
    if (scan := SCANS.get(kind or "")) is not None:
        arguments = scan.tokens | {scan.end} | ({scan.begin} if scan.begin else set())
        _wrap(cls, scan.function, arguments, functools.partial(packed_scan, scan=scan))
    if kind == "Mamba 2":
        _wrap(cls, "mamba2_split_conv1d_scan_combined", set(), not_in_packs)
    for name in DECODING:
        if hasattr(sys.modules[cls.__module__], name):
            _wrap(cls, name, set(), on_device)


def _enter(layer: nn.Module, args: Arguments, kwargs: dict[str, object]) -> tuple[Arguments, dict[str, object]]:
    # Checkpointed layers are recomputed with the same arguments, possibly in another thread.
    if RUNS in kwargs:
        runs = kwargs.pop(RUNS)
        assert isinstance(runs, MixerRuns)
        _current.set(runs)
    return args, kwargs


def _leave(layer: nn.Module, args: Arguments, output: object) -> None:
    _current.set(None)


def _wrap(cls: type[nn.Module], name: str, arguments: Set[str], wrapper: Callable[[Operation], Operation]) -> None:
    """Replace a function in the module of a mixer. Raises RunError if another version of transformers has none such."""
    module = sys.modules[cls.__module__]
    plain = getattr(module, name, None)
    missing = arguments - inspect.signature(plain).parameters.keys() if plain else {}
    if plain is None or missing:
        what = f"{name} has no argument {min(missing)}" if missing else f"there is no {name}"
        raise RunError(f"{cls.__name__} cannot be packed: in this version of transformers, {what}")
    if not hasattr(plain, PACKED):
        wrapped = functools.wraps(plain)(wrapper(plain))
        setattr(wrapped, PACKED, True)
        setattr(module, name, wrapped)


def _wrap_forward(part: nn.Module, wrapper: Callable[[Operation], Operation]) -> None:
    """Replace the forward pass of a module."""
    if not hasattr(part.forward, PACKED):
        wrapped = functools.wraps(part.forward)(wrapper(part.forward))
        setattr(wrapped, PACKED, True)
        part.forward = wrapped


def _for_device(plain: Operation, tensor: torch.Tensor) -> Operation:
    # transformers binds installed GPU kernels at import, also for tensors on a CPU, where they fail.
    return plain if tensor.is_cuda else inspect.unwrap(plain)


def on_device(plain: Operation) -> Operation:
    """Wrap a function that needs nothing but the right implementation."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return _for_device(plain, args[0])(*args, **kwargs)

    return run


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
        return function(_spread(hidden_states, context_S), weight, bias, activation=activation).index_select(-1, own_T)

    return convolve


def packed_module(plain: Operation, count: int) -> Operation:
    """Wrap a convolution module, channels first [1, C, T], that sees `count` tokens before each."""

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        runs = _current.get()
        if runs is None:
            return plain(hidden_states)
        context_S, own_T = runs.context(count)
        return plain(_spread(hidden_states, context_S)).index_select(-1, own_T)

    return forward


def _spread(hidden_states: torch.Tensor, context_S: torch.Tensor) -> torch.Tensor:
    """Return the tokens of all runs, each after those that it continues, channels first [1, C, S]."""
    # The end of a prompt is selected once per response: gradients add up in float32.
    return SelectTokens.apply(_with_zero(hidden_states[0].transpose(0, 1)), context_S).transpose(0, 1)[None]


def packed_lightning(plain: Operation, layer: nn.Module) -> Operation:
    """Wrap a whole layer, whose projections compute on the flat pack."""
    scan = packed_scan(lightning_scan, LIGHTNING)

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        if _current.get() is None:
            return plain(hidden_states, **kwargs)
        return lightning_forward(layer, hidden_states, scan)

    return forward


def not_in_packs(plain: Operation) -> Operation:
    """Wrap the kernel that computes a whole layer in training, if installed. It would also bypass an adapter."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # Without a result, the layer calls convolution and scan.
        return None if _current.get() is not None else _for_device(plain, args[0])(*args, **kwargs)

    return run


def packed_scan(plain: Operation, scan: Scan) -> Operation:
    """Wrap a scan over all tokens of a pack. Runs that continue a prompt begin with the prompt's final state."""
    # Of the PyTorch function: kernels have other names for the first arguments, which models give by position.
    names = list(inspect.signature(plain).parameters)

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2) if scan.channels_first else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        function, runs = _for_device(plain, args[0]), _current.get()
        if runs is None:
            return function(*args, **kwargs)
        # Bounds of sequences under other names are dropped: rows need none.
        given = {name: value for name, value in kwargs.items() if name in names} | dict(zip(names, args, strict=False))
        kernel = flat_kernel(scan, args[0])
        if kernel is not None and scan.bounds == "cu_seqlens":
            return _flat_scan(kernel, given, runs)
        # It has no gradient of states in the middle, where prompts end.
        if kernel is not None and not runs.shares_prompts:
            taken = given | {scan.end: False, scan.bounds: runs.numbers_T[None]}
            by_position = [taken.pop(name) for name in names[: len(args)]]
            return kernel(*by_position, **taken)
        padded = {name: _with_zero(turned(given[name])[0]) for name in scan.tokens}
        assert scan.begin or not runs.rows[0].is_continued, "shared prompts need an initial state"
        outputs: list[torch.Tensor] = []
        ends: list[torch.Tensor] = []
        for rows in runs.rows:
            begin = None if rows.parents_N is None else torch.cat(ends).index_select(0, rows.parents_N)
            taken = given | {name: turned(rows.take(tensor)) for name, tensor in padded.items()}
            taken |= {scan.end: rows.is_continued} | ({scan.begin: begin} if scan.begin else {})
            by_position = [taken.pop(name) for name in names[: len(args)]]
            result = function(*by_position, **taken)
            output, end = result if isinstance(result, tuple) else (result, None)
            outputs.append(turned(output).flatten(0, 1))
            ends += [end] if rows.is_continued else []
        whole = turned(torch.cat(outputs).index_select(0, runs.home_T)[None])
        return (whole, None) if scan.returns_pair else whole

    return run


def flat_kernel(scan: Scan, tensor: torch.Tensor) -> Operation | None:
    """Return the kernel that takes bounds of sequences, for a tensor on a GPU, if its package is installed."""
    return _imported(scan.kernel, scan.bounds) if scan.kernel and tensor.is_cuda else None


@functools.cache
def _imported(kernel: str, bounds: str) -> Operation | None:
    module, _, name = kernel.rpartition(".")
    try:
        found: Operation = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    # A kernel that swallowed the bounds would mix sequences.
    return found if bounds in inspect.signature(found).parameters else None


def _flat_scan(kernel: Operation, given: dict[str, Any], runs: MixerRuns) -> tuple[torch.Tensor, None]:
    """Run a delta rule on flat tokens [1, T, ...]. Runs that continue a prompt begin with the prompt's final state."""
    outputs: list[torch.Tensor] = []
    end = None
    for part in runs.flat:
        begin = None
        if part.parents_N is not None:
            assert end is not None, "prompts come first"
            begin = torch.cat([end, torch.zeros_like(end[:1])]).index_select(0, part.parents_N)
        query, key, value, g, beta = (
            given[name].index_select(1, part.index_L) for name in ("query", "key", "value", "g", "beta")
        )
        # The kernel has other names for the first three.
        output, end = kernel(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=begin,
            output_final_state=part.is_continued,
            use_qk_l2norm_in_kernel=given["use_qk_l2norm_in_kernel"],
            cu_seqlens=part.cu_seqlens,
            cu_seqlens_cpu=part.cu_seqlens_cpu,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1).index_select(1, runs.flat_home_T), None


def _with_zero(tokens_TD: torch.Tensor) -> torch.Tensor:
    """Append row T of zeros, which stands for padding and for the tokens before a sequence."""
    return torch.cat([tokens_TD, tokens_TD.new_zeros(1, *tokens_TD.shape[1:])])
