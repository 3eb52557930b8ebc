"""An adapter folded into its base tensor by tensor, and whole models written shard by shard and read again.

Nothing here holds more than one shard of a model. runs/model_export.py finds models and adapters.
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
from rlhf_cli.models.weight_files import TensorSource, open_weights

FACTORS = (".lora_A", ".lora_B")
LORA_A, LORA_B = (f"{kind}.weight" for kind in FACTORS)
LENGTHS = f".{MAGNITUDE}"
BASE_LAYER = ".base_layer."
"""PEFT's name for a layer under an adapter, a part of names in memory."""


class FoldedAdapter:
    """The base's tensors as the adapter changes them (`changed`), in float32; weights saved whole replace or join."""

    def __init__(self, base: TensorSource, weights: TensorSource, config: Any) -> None:
        """`weights` are the adapter's, under the names of PEFT's files; `config` is PEFT's.

        Raises:
            UsageError: the adapter does not fit the base, or has parts that are not LoRA's.
        """
        self._base, self._weights, self._config = base, weights, config
        adapter = {name.removeprefix(PREFIX): name for name in weights.names()}
        self._factors = {
            f"{name.removesuffix(LORA_A)}.weight": (whole, adapter.get(name.replace(LORA_A, LORA_B), ""))
            for name, whole in adapter.items()
            if name.endswith(LORA_A)
        }
        self._lengths = {
            f"{name.removesuffix(LENGTHS)}.weight": whole for name, whole in adapter.items() if name.endswith(LENGTHS)
        }
        parts = (LORA_A, LORA_B, LENGTHS)
        self._saved = {name: whole for name, whole in adapter.items() if not name.endswith(parts)}
        self._require_fit()

    def names(self) -> list[str]:
        known = self._base.names()
        if f"{HEAD}.weight" in self._saved:  # a model with a scalar head has no other
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
        scale = self._scale(name, rank=len(a_RI))
        if self._turned:
            return changed(weight.T, a_RI, b_OR, scale=scale, lengths_O=lengths_O).T
        return changed(weight, a_RI, b_OR, scale=scale, lengths_O=lengths_O)

    @property
    def _turned(self) -> bool:
        return bool(self._config.fan_in_fan_out)

    def _scale(self, name: str, *, rank: int) -> float:
        from peft.utils.other import get_pattern_key

        layer, pattern = name.removesuffix(".weight"), self._config.alpha_pattern
        alpha = pattern.get(get_pattern_key(pattern.keys(), layer), self._config.lora_alpha)
        return float(alpha / (rank**0.5 if self._config.use_rslora else rank))

    def _require_fit(self) -> None:
        strange = [name for name in self._saved if ".lora_" in name or ".base_layer." in name]
        if strange:
            raise UsageError(f"the adapter has more than LoRA's two factors ({strange[0]})")
        if self._lengths.keys() != (self._factors.keys() if self._config.use_dora else set()):
            raise UsageError("the adapter has magnitudes (DoRA) for other layers than factors, or lacks them")
        known = set(self._base.names())
        for name, (a, b) in self._factors.items():
            if not b or name not in known:
                raise UsageError(f"the adapter does not fit the model under it, which has no {name}")
            change = (self._weights.shape(b)[0], self._weights.shape(a)[1])
            self._require_shape(name, change[::-1] if self._turned else change)
            if name in self._lengths and self._weights.shape(self._lengths[name]) != change[:1]:
                raise UsageError(f"the adapter's magnitude of {name} has not one number a row")
        for name, whole in self._saved.items():
            if name in known:
                self._require_shape(name, self._weights.shape(whole))

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self._base.shape(name) != shape:
            raise UsageError(
                f"the adapter does not fit the model under it: {name} has shape {self._base.shape(name)}, "
                f"the adapter's part of it {shape}"
            )


def changed(
    weight_OI: torch.Tensor,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    *,
    scale: float,
    lengths_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return W + scale B A, in float32; with lengths, its rows have these lengths instead (DoRA, arXiv 2402.09353,
    eq. 5).

    Lengths are compared in their own type, as training does: in bfloat16 a row of an untrained adapter would else get
    another length than the base's, by the rounding of the magnitude.
    """
    whole_OI = weight_OI.float() + scale * (b_OR.float() @ a_RI.float())
    if lengths_O is None:
        return whole_OI
    norms_O = torch.linalg.norm(whole_OI, dim=1).to(lengths_O.dtype)
    return whole_OI * (lengths_O / norms_O).float()[:, None]


def in_folding_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return all parameters; the factors of an adapter come right before the weight that they change."""
    named = dict(model.named_parameters())
    ordered = []
    for name, parameter in named.items():
        if _is_factor(name):
            continue
        layer, _, rest = name.partition(BASE_LAYER)
        if rest == "weight":
            factors = (f"{layer}{kind}.{ACTIVE}.weight" for kind in (*FACTORS, LENGTHS))
            ordered += [(factor, named[factor]) for factor in factors if factor in named]
        ordered.append((name, parameter))
    return ordered


def parameters_without_adapter(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the model under the adapter, by the names they have without one, in the same order."""
    return [(name.replace(BASE_LAYER, "."), p) for name, p in in_folding_order(model) if not _is_factor(name)]


def folded(
    named: Iterable[tuple[str, torch.Tensor]], scales: Mapping[str, float]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in folding order, named as in a model without an adapter: changed by it, rounded to W's type.

    The tensors given are not changed, and need not be valid any longer when the next one is asked for; without an
    adapter they come back as they are. The numbers are the same as from `rlhf merge`.
    """
    factors: list[torch.Tensor] = []
    for name, tensor in named:
        if _is_factor(name):
            factors.append(tensor.clone())
            continue
        layer, _, rest = name.partition(BASE_LAYER)
        if rest == "weight":
            a_RI, b_OR, *lengths = factors
            whole = changed(tensor, a_RI, b_OR, scale=scales[layer], lengths_O=lengths[0] if lengths else None)
            tensor = whole.to(tensor.dtype)
            factors = []
        yield name.replace(BASE_LAYER, "."), tensor


def _is_factor(name: str) -> bool:
    return any(f"{kind}.{ACTIVE}." in name for kind in (*FACTORS, LENGTHS))


def plan_shards(source: TensorSource, *, dtype: torch.dtype | None, max_bytes: int) -> list[list[str]]:
    """Return the names of each shard: in the source's order, as many as fit, at least one."""
    shards: list[list[str]] = []
    size = max_bytes
    for name in source.names():
        num_bytes = torch.Size(source.shape(name)).numel() * written_type(source, name, dtype).itemsize
        if not shards or size + num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


def written_type(source: TensorSource, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type in which a tensor is written: the one asked for, which is for floating-point numbers, or its
    own.
    """
    own = source.dtype(name)
    return dtype if dtype is not None and own.is_floating_point else own


def write_shards(source: TensorSource, folder: Path, *, dtype: torch.dtype | None, max_bytes: int) -> int:
    """Write all tensors as safetensors files, with an index if there are several; the number of files."""
    shards = plan_shards(source, dtype=dtype, max_bytes=max_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        many = len(shards) > 1
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        tensors = dict(_converted(source, names, dtype))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(names, file)
        del tensors  # before the tensors of the next shard are there
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return len(shards)


def _converted(source: TensorSource, names: list[str], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, source.read(name).to(written_type(source, name, dtype)).contiguous()


def verify_shards(source: TensorSource, folder: Path, *, dtype: torch.dtype | None) -> None:
    """Raise RunError unless the files have every tensor of the source, in shape and type, and no other."""
    found = open_weights(folder)
    wrong = set(found.names()) ^ set(source.names())
    wrong |= {name for name in set(source.names()) - wrong if found.shape(name) != source.shape(name)}
    wrong |= {name for name in set(source.names()) - wrong if found.dtype(name) != written_type(source, name, dtype)}
    if wrong:
        raise RunError(f"{len(wrong)} tensors were not written as they should be, the first is {min(wrong)}")
