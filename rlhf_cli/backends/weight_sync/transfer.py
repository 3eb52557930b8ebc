"""Pushing weights from a trainer to rollout engines: what both sides agree on, and the trainer's side of it.

A push carries a version and a checksum over names and bytes; an engine takes all of it or reports the fault.
Leaves out how the bytes travel (shm; vllm_trainer for nccl and ipc) and the engines.
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

_WORDS_PER_CHUNK = 1 << 20  # 8 MiB of words at a time: the products stay in cache
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive indices over 64 bits
_MASK = (1 << 64) - 1

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def choose_sync_backend(chosen: str, *, engine: str, on_gpu: bool, shares_gpus: bool) -> SyncBackend:
    """Return how weights travel: the chosen way; for auto shm, or between vLLM and trainers on GPUs nccl or ipc.

    Raises UsageError for a way that cannot work: nccl needs one rank per GPU, ipc both sides on the same GPUs, and the
    engine of transformers reads shared memory alone.
    """
    found: SyncBackend = "shm" if not on_gpu or engine != "vllm" else "ipc" if shares_gpus else "nccl"
    if chosen == "auto" or chosen == found:
        return found
    if chosen == "shm":
        return "shm"
    if engine != "vllm":
        raise UsageError(f"--vllm_sync_backend {chosen} needs vLLM; --rollout_backend {engine} takes shm")
    if not on_gpu:
        raise UsageError(f"--vllm_sync_backend {chosen} needs a GPU; shm works here")
    where = "share GPUs" if shares_gpus else "are on different GPUs"
    raise UsageError(f"--vllm_sync_backend {chosen} does not work where actor and engines {where}; use {found}")


def check_sync_backend(chosen: str, *, engine: str) -> None:
    """Raise UsageError for a way that needs GPUs if the run would start Ray on this machine, which has none.

    A cluster at RAY_ADDRESS may have GPUs; its way is checked when the cluster is known.
    """
    if not os.environ.get("RAY_ADDRESS") and not torch.cuda.is_available():
        choose_sync_backend(chosen, engine=engine, on_gpu=False, shares_gpus=False)


@dataclass(frozen=True, slots=True)
class PushReport:
    """One push: version, size, seconds spent by the trainer, checksum, and for shm the files that the engines read."""

    version: int
    num_bytes: int
    seconds: float
    checksum: int
    num_tensors: int
    manifest: dict[str, object] | None = None


class Transport(Protocol):
    """Moves one push to the engines; `send` returns the manifest for a driver to hand on, or None if it did it."""

    def send(self, named_tensors: NamedTensors, *, version: int) -> dict[str, object] | None: ...

    def close(self) -> None: ...


def _multipliers(device: torch.device) -> torch.Tensor:
    index = torch.arange(_WORDS_PER_CHUNK, dtype=torch.int64, device=device)
    return (index * (_GOLDEN - (1 << 64))).bitwise_or_(1)  # odd, hence invertible modulo 2^64


_MULTIPLIERS: dict[torch.device, torch.Tensor] = {}


def _weighted_sum(words: torch.Tensor) -> int:
    device = words.device
    if device not in _MULTIPLIERS:
        _MULTIPLIERS[device] = _multipliers(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for chunk, start in enumerate(range(0, words.numel(), _WORDS_PER_CHUNK)):
        part = words[start : start + _WORDS_PER_CHUNK]
        total += (part * _MULTIPLIERS[device][: part.numel()]).sum() * (2 * chunk + 1)
    return int(total)


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bytes: the sum of its 8-byte words, each times an odd number of its
    position.

    The same on every device; a changed, moved or swapped word changes it. All sums wrap modulo 2^64.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    total = _weighted_sum(raw[:whole].view(torch.int64)) if raw.storage_offset() % 8 == 0 else None
    if total is None:  # a view that starts between words
        total = _weighted_sum(raw[:whole].clone().view(torch.int64))
    tail = bytes(raw[whole:].tolist())
    return (total + zlib.crc32(tail) * (raw.numel() | 1)) & _MASK


class Ledger:
    """Adds up a push tensor by tensor: names, count, bytes and one checksum that does not depend on their order."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.num_bytes = 0
        self.checksum = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Enter one tensor; raise RunError if the name comes a second time."""
        if name in self.names:
            raise RunError(f"weight push: tensor {name} was sent twice")
        self.names.add(name)
        self.num_bytes += tensor.numel() * tensor.element_size()
        key = zlib.crc32(name.encode())
        self.checksum = (self.checksum + (tensor_checksum(tensor) + key) * (2 * key + 1)) & _MASK

    def watch(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors, each entered as it passes."""
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor


def check_arrived(ledger: Ledger, manifest: Mapping[str, object]) -> None:
    """Raise RunError unless the ledger has the number of tensors and the checksum of what was sent."""
    if len(ledger.names) != manifest["num_tensors"]:
        raise RunError(f"weight push: {len(ledger.names)} tensors arrived, {manifest['num_tensors']} were sent")
    if ledger.checksum != manifest["checksum"]:
        raise RunError(
            f"weight push {manifest['version']}: checksum {ledger.checksum:016x} of what arrived is not "
            f"{manifest['checksum']:016x} of what was sent"
        )


def weights_checksum(named_tensors: NamedTensors) -> int:
    """Return the checksum of a whole set of named tensors, comparable with a push's checksum."""
    ledger = Ledger()
    for name, tensor in named_tensors:
        ledger.add(name, tensor)
    return ledger.checksum


def cast_tensors(named_tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors detached and, if they are floating point and `dtype` is given, in that dtype."""
    for name, tensor in named_tensors:
        detached = tensor.detach()
        yield name, detached.to(dtype) if dtype is not None and detached.is_floating_point() else detached


class Idle:
    """The transport of every rank but the first: takes part in gathering the weights and sends nothing."""

    def send(self, named_tensors: NamedTensors, *, version: int) -> None:
        """Run through the tensors: gathering them is a collective of all ranks."""
        for _ in named_tensors:
            pass

    def close(self) -> None:
        """Do nothing: this transport holds nothing."""


class WeightSender:
    """The trainer's side of weight pushes, used inside every trainer rank.

    With an ShmTransport on rank 0 (Idle elsewhere) `send` writes the weights and rank 0 gets a manifest, which a
    driver hands to the engines' `update_weights`; with a VllmTransport `send` drives the engines itself.
    """

    def __init__(self, transport: Transport, *, dtype: torch.dtype | None = None) -> None:
        self._transport = transport
        self._dtype = dtype

    def send(self, named_tensors: NamedTensors, version: int) -> PushReport:
        """Send tensors under their Hugging Face names, in the engines' dtype; raise RunError if that is impossible.

        Tensors are taken one by one and not kept, so that they may be gathered on the way.
        """
        start = time.perf_counter()
        ledger = Ledger()
        manifest = self._transport.send(ledger.watch(cast_tensors(named_tensors, self._dtype)), version=version)
        if manifest is not None:
            manifest |= {"checksum": ledger.checksum, "num_tensors": len(ledger.names)}
        seconds = time.perf_counter() - start
        return PushReport(version, ledger.num_bytes, seconds, ledger.checksum, len(ledger.names), manifest)

    def close(self) -> None:
        """Release the transport's resources, for shm the files of the last push."""
        self._transport.close()


def checkpoint_shapes(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a Hugging Face model directory's tensors, from its safetensors headers; {} without
    any.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def optional_tensors(config: object) -> frozenset[str]:
    """Return the names that a push may have or not: a head that shares the embedding's weight."""
    return frozenset({"lm_head.weight"}) if getattr(config, "tie_word_embeddings", False) else frozenset()


def check_tensors(
    sent: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], *, optional: frozenset[str] = frozenset()
) -> None:
    """Raise RunError that names tensors which are missing, unknown or of another shape.

    `optional` names may be absent on either side: a tied head is stored or not, as the trainer likes.
    """
    missing = sorted(expected.keys() - sent.keys() - optional)
    unknown = sorted(sent.keys() - expected.keys() - optional)
    if missing or unknown:
        parts = [f"{word} {_few(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise RunError(f"weight push does not fit the engine's model: {'; '.join(parts)}")
    for name, shape in sent.items():
        if name in expected and tuple(shape) != expected[name]:
            raise RunError(f"weight push: {name} has shape {list(shape)}, the engine's model {list(expected[name])}")


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
