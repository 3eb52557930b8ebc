"""A model that is not trained: wrapped for packs, perhaps partitioned, moved toward a trained model, and saved."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from rlhf_cli.backends.training.deepspeed_engine import BUCKET_BYTES, FrozenEngine, move_weights, whole_weights
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks

SYNC_FILE = "reference.safetensors"


class FrozenModel:
    """One rank's part of a frozen model: `hf_model` in a module, on `engine`."""

    def __init__(
        self,
        hf_model: Any,
        wrap: Callable[[Any, SequenceRanks | None], nn.Module],
        settings: DeepSpeedConfig,
        *,
        param_dtype: str,
    ) -> None:
        self.hf_model = hf_model
        self._is_partitioned = settings.zero_stage == 3
        module = wrap(hf_model, sequence_ranks(settings, hf_model.config))
        self.engine = FrozenEngine(module, settings, param_dtype=param_dtype)

    def sleep(self) -> None:
        """Move all weights to host memory."""
        self.engine.sleep()

    def wake(self) -> None:
        """Move all weights back to the GPU."""
        self.engine.wake()

    def move(self, weights: Iterable[tuple[str, torch.Tensor]], alpha: float) -> None:
        """Interpolate: (1 - alpha) * weight + alpha * full tensor of that name (TR-DPO, arXiv 2404.09656).

        Call it on all ranks, with the same names.
        """
        # One at a time: a gathered tensor is valid only until the next one.
        for name, weight in weights:
            move_weights(self.hf_model, {name: weight}, alpha)

    def num_bytes(self) -> int:
        """Return the number of bytes that `save` writes."""
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.hf_model.parameters())

    def save(self, directory: Path) -> None:
        """Save the weights, on rank 0. Call it on all ranks."""
        named = list(self.hf_model.named_parameters())
        whole = whole_weights(named, gather=self._is_partitioned, bucket_bytes=BUCKET_BYTES)
        weights = {name: weight.to("cpu", copy=True) for name, weight in whole if dist.get_rank() == 0}
        if weights:
            save_file(weights, directory / SYNC_FILE)

    def load(self, directory: Path) -> None:
        """Load weights written by `save`. Call it on all ranks."""
        self.move(load_file(directory / SYNC_FILE).items(), 1.0)
