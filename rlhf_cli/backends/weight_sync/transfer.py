"""Weight pushes from trainer to rollout engines: the shared protocol and the trainer side.

A push has a version and a checksum over names and bytes. An engine loads all of it or reports an error. Transports are
in `shm` and `vllm_trainer` (nccl, ipc).
"""

import json
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rlhf_cli.config.rollout import SyncBackend
from rlhf_cli.errors import RunError, UsageError

# 8 MiB of 64-bit words per chunk, so that the products stay in the cache.
_WORDS_PER_CHUNK = 1 << 20
# 2^64 / golden ratio: multiplying by it spreads consecutive indices over 64 bits (Fibonacci hashing).
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def choose_sync_backend(chosen: str, *, engine: str, on_gpu: bool, shares_gpus: bool) -> SyncBackend:
    """Return the weight transfer backend. "auto" selects nccl or ipc for vLLM with trainers on GPUs, otherwise shm.

    Raises UsageError for an unsupported backend: nccl requires one rank per GPU, ipc requires trainer and engines on
    the same GPUs, and the transformers engine supports only shm.
    """
    # NCCL rejects two ranks on one GPU; CUDA IPC handles are valid only on the same GPU.
    found: SyncBackend = "shm" if not on_gpu or engine != "vllm" else "ipc" if shares_gpus else "nccl"
    if chosen == "auto" or chosen == found:
        return found
    if chosen == "shm":
        return "shm"
    if engine != "vllm":
        raise UsageError(f"--vllm_sync_backend {chosen} requires vLLM; --rollout_backend {engine} supports only shm")
    if not on_gpu:
        raise UsageError(f"--vllm_sync_backend {chosen} requires a GPU; use shm")
    where = "share GPUs" if shares_gpus else "are on different GPUs"
    raise UsageError(f"--vllm_sync_backend {chosen} does not work if actor and engines {where}; use {found}")


def check_sync_backend(chosen: str, *, engine: str) -> None:
    """Raise UsageError if the backend requires GPUs but the run would start Ray on this machine without GPUs.

    A cluster at RAY_ADDRESS may have GPUs, so its backend is checked after connecting.
    """
    if not os.environ.get("RAY_ADDRESS") and not torch.cuda.is_available():
        choose_sync_backend(chosen, engine=engine, on_gpu=False, shares_gpus=False)


@dataclass(frozen=True, slots=True)
class PushReport:
    """Statistics of one push. `seconds` is trainer time; `manifest` lists the files to load (shm only)."""

    version: int
    num_bytes: int
    seconds: float
    checksum: int
    num_tensors: int
    manifest: dict[str, object] | None = None


class Transport(Protocol):
    """Transfers a push. `send` returns a manifest for the driver to forward, or None if the engines are up to date."""

    def send(self, named_tensors: NamedTensors, *, version: int) -> dict[str, object] | None: ...

    def close(self) -> None: ...


def _multipliers(device: torch.device) -> torch.Tensor:
    index = torch.arange(_WORDS_PER_CHUNK, dtype=torch.int64, device=device)
    # Subtract 2^64 because torch has only signed 64-bit products. Odd factors are invertible modulo 2^64, so each
    # change to a word changes the sum.
    return (index * (_GOLDEN - (1 << 64))).bitwise_or_(1)


_MULTIPLIERS: dict[torch.device, torch.Tensor] = {}


def _weighted_sum(words: torch.Tensor) -> int:
    device = words.device
    if device not in _MULTIPLIERS:
        _MULTIPLIERS[device] = _multipliers(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for chunk, start in enumerate(range(0, words.numel(), _WORDS_PER_CHUNK)):
        part = words[start : start + _WORDS_PER_CHUNK]
        # The odd chunk factor makes equal words in different chunks count differently.
        total += (part * _MULTIPLIERS[device][: part.numel()]).sum() * (2 * chunk + 1)
    return int(total)


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Compute a 64-bit checksum over a tensor's bytes.

    The checksum is a sum over 8-byte words, each multiplied by an odd number derived from the position. It is identical
    on every device, and a changed, moved or swapped word changes it. Sums wrap modulo 2^64.
    """
    # A sum instead of CRC or SHA: integer addition is exact in any order, so it runs in parallel on a GPU.
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    aligned = raw.numel() // 8 * 8
    total = _weighted_sum(raw[:aligned].view(torch.int64)) if raw.storage_offset() % 8 == 0 else None
    # torch cannot view bytes as int64 at an offset that is not a multiple of 8.
    if total is None:
        total = _weighted_sum(raw[:aligned].clone().view(torch.int64))
    tail = bytes(raw[aligned:].tolist())
    return (total + zlib.crc32(tail) * (raw.numel() | 1)) & _MASK


class Ledger:
    """Accumulates a push: tensor names, total bytes and an order-independent checksum."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.num_bytes = 0
        self.checksum = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor. Raises RunError for a duplicate name."""
        if name in self.names:
            raise RunError(f"weight push: tensor {name} was sent twice")
        self.names.add(name)
        self.num_bytes += tensor.numel() * tensor.element_size()
        # The name is part of the checksum: swapping two tensors with equal shapes must change it.
        key = zlib.crc32(name.encode())
        self.checksum = (self.checksum + (tensor_checksum(tensor) + key) * (2 * key + 1)) & _MASK

    def watch(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors and add each one."""
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor


def check_arrived(ledger: Ledger, manifest: Mapping[str, object]) -> None:
    """Raise RunError if tensor count or checksum differ from the sender's."""
    if len(ledger.names) != manifest["num_tensors"]:
        raise RunError(f"weight push: {len(ledger.names)} tensors arrived, {manifest['num_tensors']} were sent")
    if ledger.checksum != manifest["checksum"]:
        raise RunError(
            f"weight push {manifest['version']}: checksum {ledger.checksum:016x} of the received weights differs from "
            f"{manifest['checksum']:016x} of the sent weights"
        )


def weights_checksum(named_tensors: NamedTensors) -> int:
    """Compute the checksum that a push with these tensors would have."""
    ledger = Ledger()
    for name, tensor in named_tensors:
        ledger.add(name, tensor)
    return ledger.checksum


def _cast_tensors(named_tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield detached tensors. If `dtype` is set, floating-point tensors are cast to it."""
    for name, tensor in named_tensors:
        detached = tensor.detach()
        yield name, detached.to(dtype) if dtype is not None and detached.is_floating_point() else detached


class Idle:
    """Transport for all ranks except rank 0: joins the weight gathering and sends nothing."""

    def send(self, named_tensors: NamedTensors, *, version: int) -> None:
        """Iterate all tensors, because gathering them is a collective."""
        for _ in named_tensors:
            pass

    def close(self) -> None:
        """No-op: this transport has no resources."""


class WeightSender:
    """Sends weights from the trainer. Every trainer rank creates one.

    With ShmTransport on rank 0 (Idle on the other ranks), `send` writes the weights and returns a manifest on rank 0,
    which the driver passes to the engines' `update_weights`. With VllmTransport, `send` also updates the engines.
    """

    def __init__(self, transport: Transport, *, dtype: torch.dtype | None = None) -> None:
        self._transport = transport
        self._dtype = dtype

    def send(self, named_tensors: NamedTensors, version: int) -> PushReport:
        """Send tensors with Hugging Face names in the engine dtype. Raises RunError on failure.

        Tensors are consumed one at a time and not retained, so they can be gathered lazily.
        """
        start = time.perf_counter()
        ledger = Ledger()
        # Watch after the cast: the checksum must cover the bytes that the engines receive.
        manifest = self._transport.send(ledger.watch(_cast_tensors(named_tensors, self._dtype)), version=version)
        if manifest is not None:
            manifest |= {"checksum": ledger.checksum, "num_tensors": len(ledger.names)}
        seconds = time.perf_counter() - start
        return PushReport(version, ledger.num_bytes, seconds, ledger.checksum, len(ledger.names), manifest)

    def close(self) -> None:
        """Release the transport's resources, such as shared-memory files."""
        self._transport.close()


def checkpoint_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Read tensor names and shapes from the safetensors headers in a model folder; {} without safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with file.open("rb") as stream:
            # safetensors format: an 8-byte little-endian header size, then the JSON header.
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def optional_tensors(config: object) -> frozenset[str]:
    """Return names that may be missing from a push: a language model head tied to the embedding."""
    return frozenset({"lm_head.weight"}) if getattr(config, "tie_word_embeddings", False) else frozenset()


def check_tensors(
    sent: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], *, optional: frozenset[str] = frozenset()
) -> None:
    """Raise RunError for missing or unknown tensors and shape mismatches.

    `optional` names may be absent on either side, such as a tied head, which checkpoints may omit.
    """
    missing = sorted(expected.keys() - sent.keys() - optional)
    unknown = sorted(sent.keys() - expected.keys() - optional)
    if missing or unknown:
        parts = [f"{word} {_few(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise RunError(f"weight push does not match the engine's model: {'; '.join(parts)}")
    for name, shape in sent.items():
        if name in expected and tuple(shape) != expected[name]:
            raise RunError(
                f"weight push: {name} has shape {list(shape)}, but the engine's model expects {list(expected[name])}"
            )


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
