"""Reference models for preference training: a second model, the base model of an adapter, or cached log-probs."""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine, Forward
from rlhf_cli.backends.training.frozen_model import FrozenModel
from rlhf_cli.backends.training.partitioned_loading import partitioned_loading
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.environment import user_cache
from rlhf_cli.models.adapters import adapter_off
from rlhf_cli.models.finding import find_model
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel

Columns = dict[str, np.ndarray]
_Results = Callable[[DeepSpeedEngine, list[object]], list[torch.Tensor]]


class FrozenReference(FrozenModel):
    """A frozen second model, which may be moved toward the trained model."""

    def __init__(self, source: ModelConfig, settings: DeepSpeedConfig) -> None:
        partition = partitioned_loading(settings, param_dtype=source.param_dtype)
        hf_model = load_causal_lm(source, device=distributed.device(), partition=partition)
        super().__init__(hf_model, PolicyModel, settings, param_dtype=source.param_dtype)

    def infer(self, batches: Sequence[object], forward: Forward) -> list[torch.Tensor]:
        """Run `forward` on each micro-batch."""
        return self.engine.infer(batches, forward)

    def results(self, forward: Forward) -> _Results:
        """Return a function (trained engine, micro-batches) -> results that runs `forward` on this model."""
        return lambda engine, batches: self.infer(batches, forward)


def base_results(forward: Forward) -> _Results:
    """Return a function (engine, micro-batches) -> results that runs `forward` with the adapter disabled."""

    def infer(engine: DeepSpeedEngine, batches: list[object]) -> list[torch.Tensor]:
        with adapter_off(engine.module):
            return engine.infer(batches, forward)

    return infer


def kept_columns(source: ModelConfig, digest: str, compute: Callable[[], Columns]) -> Columns:
    """Return reference results for a dataset, from the cache or computed on all ranks.

    The cache key consists of model fingerprint, dtype and `digest`, which must identify the data.
    """
    key = hashlib.blake2b(digest_size=16)
    key.update(f"{find_model(source).fingerprint()} {source.param_dtype} {digest}".encode())
    path = user_cache("reference") / f"{key.hexdigest()}.npz"
    stored = _read(path)
    # `compute` is a collective: if one rank has no cached file, such as on another machine, all must compute.
    if not distributed.any_rank(stored is None):
        assert stored is not None, "every rank has the columns"
        return stored
    columns = compute()
    if dist.get_rank() == 0:
        # The cache is optional: if the folder is not writable, the next run computes again.
        with suppress(OSError):
            _write(path, columns)
    distributed.barrier()
    return columns


def _read(path: Path) -> Columns | None:
    """Read cached columns, or return None if the file is missing or damaged."""
    try:
        with np.load(path) as stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, TypeError, BadZipFile):
        return None


def _write(path: Path, columns: Columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write to a temporary file and rename it, so that concurrent runs never read an incomplete file.
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
        try:
            np.savez(file, **columns)  # type: ignore[arg-type]
            file.flush()
            Path(file.name).rename(path)
        finally:
            Path(file.name).unlink(missing_ok=True)
