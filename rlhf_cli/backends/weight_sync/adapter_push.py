"""LoRA-only weight pushes to vLLM, whose engines keep the base model.

Adapters are small, so tensors and settings travel in the push manifest through Ray's object store and reach engines on
every machine. vLLM loads adapters from a folder, so each engine writes a temporary one until all workers have read it.
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

# The only values that vLLM's `LoRAConfig` allows (`MaxLoRARanks`).
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Allowed values for vLLM's `max_lora_rank`, which sets the adapter memory that vLLM reserves."""
_IN_MEMORY = Path("/dev/shm")


class ObjectTransport:
    """Sends a push as byte arrays inside the manifest. Used on the sending rank.

    `config` is the adapter configuration from `vllm_config`.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def send(self, named_tensors: NamedTensors, *, version: int) -> dict[str, object]:
        """Copy the tensors into the manifest."""
        tensors = [_packed(name, tensor) for name, tensor in named_tensors]
        return {"version": version, "config": self._config, "tensors": tensors}

    def close(self) -> None:
        """No-op: Ray frees a manifest after the last reference is gone."""


def adapter_manifest(named_tensors: NamedTensors, config: Mapping[str, object], *, version: int) -> dict[str, object]:
    """Build an adapter push without a trainer. An empty push disables the adapter, so the base model generates."""
    manifest = WeightSender(ObjectTransport(config)).send(named_tensors, version).manifest
    assert manifest is not None, "this transport always returns one"
    return manifest


def _packed(name: str, tensor: torch.Tensor) -> dict[str, object]:
    # Copy even on a CPU: gathered weights are freed when the iteration continues, and Ray serializes the manifest
    # later. Bytes, because NumPy has no bfloat16.
    raw = tensor.to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "bytes": raw}


def read_adapter(manifest: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Return a push's tensors and checksum. Raises RunError if the received data differs from the sent data."""
    ledger, tensors = Ledger(), {}
    for entry in manifest["tensors"]:
        # Ray's arrays are read-only views of the object store; torch requires writable memory.
        raw = torch.from_numpy(entry["bytes"].copy())
        tensors[entry["name"]] = raw.view(getattr(torch, entry["dtype"])).view(entry["shape"])
        ledger.add(entry["name"], tensors[entry["name"]])
    check_arrived(ledger, manifest)
    return tensors, ledger.checksum


@contextmanager
def written_adapter(tensors: dict[str, torch.Tensor], config: Mapping[str, object]) -> Iterator[str]:
    """Write a temporary adapter folder in PEFT's format and yield the path."""
    # Shared memory avoids disk writes on every push.
    parent = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="rlhf-adapter-", dir=parent) as folder:
        (Path(folder) / ADAPTER_FILE).write_text(json.dumps(config))
        save_file(tensors, Path(folder) / WEIGHTS_FILE, metadata={"format": "pt"})
        yield folder


def vllm_config(config: Any) -> dict[str, object]:
    """Select the fields of a PEFT LoRA config that vLLM reads, as JSON values."""
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
    """Return vLLM's smallest `max_lora_rank` that fits all adapters."""
    highest = max(map(highest_rank, configs))
    return next(rank for rank in VLLM_RANKS if rank >= highest)


def highest_rank(config: Mapping[str, Any]) -> int:
    """Return the highest rank in any layer."""
    return max([config["r"], *config["rank_pattern"].values()])


def check_adapter_push(plan: AdapterPlan | None, *, backend: str, sync_backend: str) -> None:
    """Raise UsageError if the engines cannot load the adapter separately from the model."""
    flag = "--lora_push adapter"
    if plan is None:
        raise UsageError(f"{flag} requires a LoRA adapter: set --lora_rank")
    if backend != "vllm":
        raise UsageError(f"{flag} requires vLLM; --rollout_backend {backend} supports only --lora_push merged")
    if sync_backend != "auto":
        raise UsageError(f"{flag} sends tensors through Ray: remove --vllm_sync_backend {sync_backend}")
    if plan.in_4bit:
        raise UsageError(
            f"{flag}: engines would load the base model in 16 bits while the actor uses 4 bits; remove one of the two"
        )
    if plan.config.use_dora:
        raise UsageError(f"{flag}: vLLM does not support DoRA; use --lora_push merged")
    if (rank := highest_rank(vllm_config(plan.config))) > VLLM_RANKS[-1]:
        raise UsageError(
            f"{flag}: vLLM supports ranks up to {VLLM_RANKS[-1]}, not {rank}; --lora_push merged has no limit"
        )
