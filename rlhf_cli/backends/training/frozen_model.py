"""Frozen models: perhaps partitioned or offloaded, moved toward a trained model, and saved."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_config import deepspeed_config
from rlhf_cli.backends.training.deepspeed_engine import (
    BUCKET_BYTES,
    Forward,
    inferred,
    register_external_parameters,
    whole_weights,
)
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.backends.training.sleep import HostCopies
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks

_SYNC_FILE = "reference.safetensors"


class FrozenEngine:
    """One rank's part of a frozen model: partitioned under ZeRO-3, otherwise complete.

    With `param_offload`, weights stay in host memory and are on the GPU only during use. Under ZeRO-3, DeepSpeed does
    this layer by layer. Unless partitioned, `staying` parameters always remain on the GPU.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: DeepSpeedConfig,
        *,
        param_dtype: str,
        staying: Iterable[nn.Parameter] = (),
    ) -> None:
        self._partitioned = settings.zero_stage == 3
        module.requires_grad_(False).eval()
        if self._partitioned:
            num_gpus = distributed.num_gpus()
            config = deepspeed_config(settings, param_dtype=param_dtype, max_norm=0.0, num_gpus=num_gpus)
            register_external_parameters(module)
            module, *_ = deepspeed.initialize(model=module, config=config)
        else:
            module.to(distributed.device())
        self._module = module
        stays = {id(parameter) for parameter in staying}
        moving = (parameter for parameter in module.parameters() if id(parameter) not in stays)
        self._weights = HostCopies(moving, pin=torch.cuda.is_available())
        self._is_offloaded = settings.param_offload and not self._partitioned
        if self._is_offloaded:
            self._weights.leave()

    @torch.no_grad()
    def infer(self, micro_batches: Sequence[Any], forward: Forward) -> list[torch.Tensor]:
        """Run `forward(model, micro_batch)` on this rank's micro-batches. Returns results on the CPU."""
        with self._on_device():
            return inferred(self._module, self._module, micro_batches, forward)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Move offloaded weights to the GPU inside the block."""
        if not self._is_offloaded:
            yield
            return
        self._weights.come_back(distributed.device())
        try:
            yield
        finally:
            self._weights.leave()

    def sleep(self) -> None:
        """Move unpartitioned weights to host memory. Partitioned weights stay, because they are small on each rank."""
        if not self._partitioned and torch.cuda.is_available():
            self._weights.leave()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move weights back to the GPU."""
        if not self._is_offloaded:
            self._weights.come_back(distributed.device())


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
            save_file(weights, directory / _SYNC_FILE)

    def load(self, directory: Path) -> None:
        """Load weights written by `save`. Call it on all ranks."""
        self.move(load_file(directory / _SYNC_FILE).items(), 1.0)


@torch.no_grad()
def move_weights(module: nn.Module, towards: Mapping[str, torch.Tensor], alpha: float) -> None:
    """Interpolate parameters in place: (1 - alpha) * parameter + alpha * full tensor. Call it on all ranks.

    For partitioned parameters, the tensors on rank 0 are used.
    """
    own = dict(module.named_parameters())
    for name, weight in towards.items():
        parameter = own[name]
        if not hasattr(parameter, "ds_tensor"):
            parameter.lerp_(weight.to(parameter.device), alpha)
            continue
        # On exit, DeepSpeed broadcasts the modified parameter from rank 0 and partitions it again.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.lerp_(weight.to(parameter.device), alpha)
