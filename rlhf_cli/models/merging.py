"""Merge an adapter into its base tensor by tensor, write models shard by shard, and verify them.

At most one shard is in memory. runs/model_export.py locates models and adapters.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.adapters import ACTIVE, HEAD, MAGNITUDE, PREFIX
from rlhf_cli.models.weight_files import TensorSource, open_weights, plan_shards, written_type

FACTORS = (".lora_A", ".lora_B")
_LORA_A, _LORA_B = (f"{kind}.weight" for kind in FACTORS)
_LENGTHS = f".{MAGNITUDE}"
_BASE_LAYER = ".base_layer."
"""PEFT's name for the wrapped layer, part of in-memory parameter names."""


class FoldedAdapter:
    """Base tensors with the adapter merged in float32; weights that the adapter stores in full replace base weights."""

    def __init__(self, base: TensorSource, weights: TensorSource, config: Any) -> None:
        """Match adapter weights, named as in PEFT files, to base weights. `config` is a PEFT LoraConfig.

        Raises:
            UsageError: the adapter does not match the base, or contains parts other than LoRA.
        """
        self._base, self._weights, self._config = base, weights, config
        adapter = {name.removeprefix(PREFIX): name for name in weights.names()}
        self._factors = {
            f"{name.removesuffix(_LORA_A)}.weight": (whole, adapter.get(name.replace(_LORA_A, _LORA_B), ""))
            for name, whole in adapter.items()
            if name.endswith(_LORA_A)
        }
        self._lengths = {
            f"{name.removesuffix(_LENGTHS)}.weight": whole for name, whole in adapter.items() if name.endswith(_LENGTHS)
        }
        parts = (_LORA_A, _LORA_B, _LENGTHS)
        self._saved = {name: whole for name, whole in adapter.items() if not name.endswith(parts)}
        self._require_fit()

    def names(self) -> list[str]:
        known = self._base.names()
        # A reward model has a scalar head instead of the language-model head.
        if f"{HEAD}.weight" in self._saved:
            known = [name for name in known if not name.startswith("lm_head.")]
        return known + [name for name in self._saved if name not in set(known)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._saved[name]) if name in self._saved else self._base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._weights.dtype(self._saved[name]) if name in self._saved else self._base.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        if name in self._saved:
            return self._weights.read(self._saved[name])
        weight = self._base.read(name)
        if name not in self._factors:
            return weight
        a_RI, b_OR = (self._weights.read(factor) for factor in self._factors[name])
        lengths_O = self._weights.read(self._lengths[name]) if name in self._lengths else None
        # The rank comes from the stored factor: with rank_pattern, layers have different ranks.
        scale = self._scale(name, rank=len(a_RI))
        # PEFT sets fan_in_fan_out for Conv1D layers such as GPT-2's, which store the transposed weight.
        if self._transposed:
            return _changed(weight.T, a_RI, b_OR, scale=scale, lengths_O=lengths_O).T
        return _changed(weight, a_RI, b_OR, scale=scale, lengths_O=lengths_O)

    @property
    def _transposed(self) -> bool:
        return bool(self._config.fan_in_fan_out)

    def _scale(self, name: str, *, rank: int) -> float:
        from peft.utils.other import get_pattern_key

        # Resolve alpha_pattern the way PEFT does: keys may be regular expressions that match a suffix of the layer
        # name.
        layer, pattern = name.removesuffix(".weight"), self._config.alpha_pattern
        alpha = pattern.get(get_pattern_key(pattern.keys(), layer), self._config.lora_alpha)
        return float(alpha / (rank**0.5 if self._config.use_rslora else rank))

    def _require_fit(self) -> None:
        unexpected = [name for name in self._saved if ".lora_" in name or ".base_layer." in name]
        if unexpected:
            raise UsageError(f"the adapter contains weights other than LoRA factors ({unexpected[0]})")
        if self._lengths.keys() != (self._factors.keys() if self._config.use_dora else set()):
            raise UsageError("the adapter's DoRA magnitudes do not match the layers with LoRA factors")
        known = set(self._base.names())
        for name, (a, b) in self._factors.items():
            if not b or name not in known:
                raise UsageError(f"the adapter does not match its base model, which has no {name}")
            change = (self._weights.shape(b)[0], self._weights.shape(a)[1])
            self._require_shape(name, change[::-1] if self._transposed else change)
            if name in self._lengths and self._weights.shape(self._lengths[name]) != change[:1]:
                raise UsageError(f"the adapter's DoRA magnitude for {name} needs one value per row")
        for name, whole in self._saved.items():
            if name in known:
                self._require_shape(name, self._weights.shape(whole))

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self._base.shape(name) != shape:
            raise UsageError(
                f"the adapter does not match its base model: {name} has shape {self._base.shape(name)}, "
                f"but the adapter expects {shape}"
            )


def _changed(
    weight_OI: torch.Tensor,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    *,
    scale: float,
    lengths_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute W + scale B A in float32, optionally with DoRA (arXiv 2402.09353, eq. 5).

    With `lengths_O`, the DoRA magnitudes, rows are rescaled to these norms. Norms are compared in the dtype of the
    magnitudes, as in training: in bfloat16, the rounded magnitude would otherwise rescale the rows of an untrained
    adapter.
    """
    whole_OI = weight_OI.float() + scale * (b_OR.float() @ a_RI.float())
    if lengths_O is None:
        return whole_OI
    norms_O = torch.linalg.norm(whole_OI, dim=1).to(lengths_O.dtype)
    return whole_OI * (lengths_O / norms_O).float()[:, None]


def in_folding_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return all parameters, with the adapter factors right before the weight that they modify."""
    named = dict(model.named_parameters())
    ordered = []
    for name, parameter in named.items():
        # PEFT registers factors after the base weight, but `folded` needs them first: it streams one tensor at a time.
        if _is_factor(name):
            continue
        layer, _, rest = name.partition(_BASE_LAYER)
        if rest == "weight":
            factors = (f"{layer}{kind}.{ACTIVE}.weight" for kind in (*FACTORS, _LENGTHS))
            ordered += [(factor, named[factor]) for factor in factors if factor in named]
        ordered.append((name, parameter))
    return ordered


def parameters_without_adapter(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the base model parameters in folding order, under the names they have without an adapter."""
    return [(name.replace(_BASE_LAYER, "."), p) for name, p in in_folding_order(model) if not _is_factor(name)]


def folded(
    named: Iterable[tuple[str, torch.Tensor]], scales: Mapping[str, float]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge a stream of full tensors in folding order, named as in a model without an adapter.

    Results are rounded to the dtype of W and equal the output of `rlhf merge`. Input tensors are not modified and may
    be reused after the next one is requested. Without an adapter they pass through unchanged.
    """
    factors: list[torch.Tensor] = []
    for name, tensor in named:
        if _is_factor(name):
            # Copy: ZeRO-3 releases gathered tensors when it gathers the next bucket.
            factors.append(tensor.clone())
            continue
        layer, _, rest = name.partition(_BASE_LAYER)
        if rest == "weight":
            a_RI, b_OR, *lengths = factors
            whole = _changed(tensor, a_RI, b_OR, scale=scales[layer], lengths_O=lengths[0] if lengths else None)
            tensor = whole.to(tensor.dtype)
            factors = []
        yield name.replace(_BASE_LAYER, "."), tensor


def _is_factor(name: str) -> bool:
    return any(f"{kind}.{ACTIVE}." in name for kind in (*FACTORS, _LENGTHS))


def write_shards(source: TensorSource, folder: Path, *, dtype: torch.dtype | None, max_bytes: int) -> int:
    """Write all tensors as safetensors files, with an index for more than one file. Returns the number of files."""
    shards = plan_shards(source, source.names(), dtype=dtype, max_bytes=max_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        many = len(shards) > 1
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        tensors = dict(_converted(source, names, dtype))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(names, file)
        # Release this shard before reading the next one.
        del tensors
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return len(shards)


def _converted(source: TensorSource, names: list[str], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        # safetensors refuses to save non-contiguous tensors, such as transposed merge results.
        yield name, source.read(name).to(written_type(source, name, dtype)).contiguous()


def verify_shards(source: TensorSource, folder: Path, *, dtype: torch.dtype | None) -> None:
    """Raise RunError unless the files contain exactly the source tensors, with the same shapes and expected dtypes."""
    saved = open_weights(folder)
    wrong = set(saved.names()) ^ set(source.names())
    wrong |= {name for name in set(source.names()) - wrong if saved.shape(name) != source.shape(name)}
    wrong |= {name for name in set(source.names()) - wrong if saved.dtype(name) != written_type(source, name, dtype)}
    if wrong:
        raise RunError(f"verification failed: {len(wrong)} written tensors differ from the source, first {min(wrong)}")
