"""Pushes of an adapter alone to vLLM, whose engines keep the model under it.

An adapter is small: its tensors and settings travel in the manifest of the push, by Ray's object store, so that they
reach engines on every machine. vLLM reads adapters from a folder; each engine writes one for as long as its workers
read it.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlhf_cli.backends.weight_sync.transfer import Ledger, NamedTensors, WeightSender, check_arrived
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import WEIGHTS_FILE, AdapterPlan, sorted_names
from rlhf_cli.models.finding import ADAPTER_FILE

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank`: it reserves memory for an adapter of that rank."""
_IN_MEMORY = Path("/dev/shm")


class ObjectTransport:
    """Sends pushes as arrays of bytes within their manifests; used by the process that sends.

    `config` are the adapter's settings by `vllm_config`.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def send(self, named_tensors: NamedTensors, *, version: int) -> dict[str, object]:
        """Return the manifest with copies of the tensors."""
        tensors = [_packed(name, tensor) for name, tensor in named_tensors]
        return {"version": version, "config": self._config, "tensors": tensors}

    def close(self) -> None:
        """Do nothing: Ray frees a manifest when nobody needs it any more."""


def adapter_manifest(named_tensors: NamedTensors, config: Mapping[str, object], *, version: int) -> dict[str, object]:
    """Return the push of an adapter without a trainer; without tensors the model answers alone."""
    manifest = WeightSender(ObjectTransport(config)).send(named_tensors, version).manifest
    assert manifest is not None, "this transport always returns one"
    return manifest


def _packed(name: str, tensor: torch.Tensor) -> dict[str, object]:
    raw = tensor.to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "bytes": raw}


def read_adapter(manifest: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Return the tensors of a push and their checksum. Raise RunError if something else arrived than was sent."""
    ledger, tensors = Ledger(), {}
    for entry in manifest["tensors"]:
        raw = torch.from_numpy(entry["bytes"].copy())  # Ray's arrays are read-only
        tensors[entry["name"]] = raw.view(getattr(torch, entry["dtype"])).view(entry["shape"])
        ledger.add(entry["name"], tensors[entry["name"]])
    check_arrived(ledger, manifest)
    return tensors, ledger.checksum


@contextmanager
def written_adapter(tensors: dict[str, torch.Tensor], config: Mapping[str, object]) -> Iterator[str]:
    """Yield the path of a folder as PEFT writes it, which is removed after the block."""
    place = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="rlhf-adapter-", dir=place) as folder:
        (Path(folder) / ADAPTER_FILE).write_text(json.dumps(config))
        save_file(tensors, Path(folder) / WEIGHTS_FILE, metadata={"format": "pt"})
        yield folder


def vllm_config(config: Any) -> dict[str, object]:
    """Return the settings that vLLM reads of PEFT's configuration of an adapter, as JSON."""
    return {
        "peft_type": "LORA",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": bool(config.use_rslora),
        "rank_pattern": dict(config.rank_pattern or {}),
        "alpha_pattern": dict(config.alpha_pattern or {}),
        "target_modules": sorted_names(config.target_modules),
    }


def vllm_rank(*configs: Mapping[str, Any]) -> int:
    """Return the smallest `max_lora_rank` of vLLM that holds each of the adapters."""
    highest = max(map(highest_rank, configs))
    return next(rank for rank in VLLM_RANKS if rank >= highest)


def highest_rank(config: Mapping[str, Any]) -> int:
    """Return the highest rank of all layers of the adapter."""
    return max([config["r"], *config["rank_pattern"].values()])


def check_adapter_push(plan: AdapterPlan | None, *, backend: str, sync_backend: str) -> None:
    """Raise UsageError unless engines can take the adapter apart from its model."""
    flag = "--lora_push adapter"
    if plan is None:
        raise UsageError(f"{flag} is about an adapter: give --lora_rank")
    if backend != "vllm":
        raise UsageError(f"{flag} needs vLLM; engines of --rollout_backend {backend} take merged weights")
    if sync_backend != "auto":
        raise UsageError(f"{flag} sends tensors through Ray: leave --vllm_sync_backend {sync_backend} away")
    if plan.in_4bit:
        raise UsageError(f"{flag}: engines would have the model in 16 bits, the actor has it in 4: leave one away")
    if plan.config.use_dora:
        raise UsageError(f"{flag}: vLLM computes no DoRA; --lora_push merged pushes it")
    if (rank := highest_rank(vllm_config(plan.config))) > VLLM_RANKS[-1]:
        raise UsageError(
            f"{flag}: vLLM takes ranks up to {VLLM_RANKS[-1]}, not {rank}; --lora_push merged has no bound"
        )
