"""Training with DeepSpeed: optimizer steps over packed micro-batches, checkpoints, and offloading to host memory.

Micro-batching never changes the update. The caller divides the loss by the step's global number of tokens (or
sequences), so gradients are summed over micro-batches and ranks. DeepSpeed averages over ranks, which is undone here.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.algorithms.aggregation import Metrics, combine_metrics
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.checkpoint_layout import DEEPSPEED, StateLayout, read_layout, write_layout
from rlhf_cli.backends.training.deepspeed_config import OPTIMIZER_BYTES, deepspeed_config
from rlhf_cli.backends.training.discarded_gradients import discard_gradients
from rlhf_cli.backends.training.memory import named_shortage, note_peak, peak_gpu_memory
from rlhf_cli.backends.training.optimizers import fit_to_partitions, make_optimizer, make_schedule, set_rates
from rlhf_cli.backends.training.random_states import random_states, seed_everything, set_random_states
from rlhf_cli.backends.training.reshaping import layout_of, load_cut_anew
from rlhf_cli.backends.training.router_loss import RouterLoss
from rlhf_cli.backends.training.sleep import TrainedStates
from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.errors import OutOfMemory
from rlhf_cli.models.adapters import weights_read_by_others
from rlhf_cli.models.policy import LanguageModel
from rlhf_cli.models.tensor_parallel import split_dimension, split_layers, whole_shape
from rlhf_cli.tracking.figures import PACK_TOKENS

ComputeLoss = Callable[[nn.Module, Any], tuple[torch.Tensor, Metrics]]
Forward = Callable[[nn.Module, Any], torch.Tensor]
Smaller = Callable[[int], Sequence[Any]]
"""Returns the micro-batches of a step with at most this many tokens, except for longer sequences."""

# 256 MiB: large enough for few collectives, small compared to a GPU's memory.
BUCKET_BYTES = 1 << 28
"""Bytes of weights gathered at a time under ZeRO-3."""


class DeepSpeedEngine:
    """One rank's part of a trained model, with optimizer and learning rate schedule."""

    def __init__(
        self,
        module: nn.Module,
        settings: DeepSpeedConfig,
        *,
        optim: OptimConfig,
        learning_rate: float,
        total_steps: int,
        param_dtype: str,
        sleeps: bool = False,
    ) -> None:
        num_gpus = distributed.num_gpus()
        config = deepspeed_config(
            settings, param_dtype=param_dtype, max_norm=optim.max_norm, num_gpus=num_gpus, optimizer=optim.optim
        )
        config |= _tensor_parallel_config(module, settings.tensor_parallel_size)
        # Before the optimizer is created, which keeps references to the parameters.
        module.to(distributed.device())
        optimizer = make_optimizer(module, settings, learning_rate=learning_rate, optim=optim, sleeps=sleeps)
        scheduler = make_schedule(optimizer, optim, total_steps=total_steps)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config
        )
        # DeepSpeed's hook compares the inputs of tensor-parallel ranks, but supports only tensors, not packs.
        if settings.tensor_parallel_size > 1:
            self._engine.first_dataloader_check.remove()
        self._stage = settings.zero_stage
        # At stage 0, DeepSpeed would reduce a flat copy of all gradients even with one rank.
        self._engine.enable_backward_allreduce = dist.get_world_size() > 1 or self._stage > 0
        self._ranks_per_pack = settings.ranks_per_pack
        self._ranks_per_layer = settings.tensor_parallel_size
        self._states = TrainedStates(self._engine, module, device=distributed.device())
        self._skipped_in_a_row = 0
        self.token_limit: int | None = None
        routers = getattr(module, "routers", None) if optim.aux_loss_coef else None
        self._router_loss = None if routers is None else RouterLoss(routers, optim.aux_loss_coef)
        if self._stage == 3:
            register_external_parameters(module)
        if self._stage == 0 and self._engine.bfloat16_enabled():
            _undo_first_step(self._engine.optimizer)
        if self._stage in (1, 2):
            fit_to_partitions(optimizer, self._engine.optimizer)
        self._optimizer_bytes = OPTIMIZER_BYTES[optim.optim]

    @property
    def module(self) -> nn.Module:
        """The wrapped model. Do not call its forward directly; use the engine's methods."""
        return self._engine.module

    def train_step(
        self,
        micro_batches: Sequence[Any],
        compute_loss: ComputeLoss,
        *,
        smaller: Smaller | None = None,
        accumulated: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Run one optimizer step. Returns the step's metrics over all ranks, with `grad_norm` and `lr`.

        If a loss or gradient is not finite, all ranks skip the step. `skipped_steps` counts skipped steps in the run,
        `skipped_in_a_row` counts them since the last successful step or the start of this process.

        Args:
            micro_batches: this rank's micro-batches. Every rank must pass the same number.
            compute_loss: (model, micro-batch) -> (loss, metrics), both as additive contributions to the global mean.
                Metrics with names ending in `_max` are combined as maxima.
            smaller: packs the step again with fewer tokens. On one rank at ZeRO 0 to 2, a step that runs out of memory
                starts again with half the tokens, the engine's `token_limit` from then on.
            accumulated: called when all gradients are accumulated, before the optimizer step.
        """
        metrics = self._accumulate_within_memory(micro_batches, compute_loss, smaller)
        accumulated()
        # Before the optimizer step, which advances the schedule.
        lr = self._engine.get_lr()[0]
        norm = self._optimizer_step()
        note_peak("train")
        reduced = self._reduced({**metrics, **peak_gpu_memory()})
        return reduced | {
            "grad_norm": norm,
            "lr": float(lr),
            "skipped_steps": float(self._engine.skipped_steps),
            "skipped_in_a_row": float(self._skipped_in_a_row),
            **({} if self.token_limit is None else {PACK_TOKENS: float(self.token_limit)}),
        }

    def _accumulate_within_memory(
        self, micro_batches: Sequence[Any], compute_loss: ComputeLoss, smaller: Smaller | None
    ) -> Metrics:
        """Accumulate the step's gradients. If memory is full, start the step again with smaller micro-batches."""
        if smaller is None or self._stage == 3 or dist.get_world_size() > 1:
            return self._accumulate_gradients(micro_batches, compute_loss)
        state = random_states()
        while True:
            try:
                return self._accumulate_gradients(micro_batches, compute_loss)
            except OutOfMemory as error:
                limit = 0 if error.shortage is None else error.shortage.tokens // 2
                parts = smaller(limit) if limit else []
                # A micro-batch of one sequence cannot be split.
                if len(parts) <= len(micro_batches):
                    raise
            # Not in the handler, where the error still holds activations of the micro-batch that failed.
            gc.collect()
            discard_gradients(self._engine)
            set_random_states(state)
            micro_batches, self.token_limit = parts, limit

    def _accumulate_gradients(self, micro_batches: Sequence[Any], compute_loss: ComputeLoss) -> Metrics:
        """Run forward and backward passes for all micro-batches. Returns this rank's metrics."""
        self._engine.train()
        if self._router_loss is not None:
            compute_loss = self._router_loss.added_to(compute_loss, model=self._engine, micro_batches=micro_batches)
        total: Metrics = {}
        for index, micro_batch in enumerate(micro_batches):
            # The boundary must be set before the backward pass, inside which DeepSpeed reduces gradients.
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            with named_shortage("training", self.module, micro_batch):
                loss, metrics = compute_loss(self._engine, micro_batch.to(distributed.device()))
                # Undo DeepSpeed's average over ranks. Tensor-parallel ranks hold parts of the same gradient, so
                # DeepSpeed averages over groups of them.
                num_gradients = dist.get_world_size() // self._ranks_per_layer
                self._engine.backward(_spreading_nan(loss) * num_gradients)
            total = combine_metrics(total, metrics)
        return total

    def _optimizer_step(self) -> float:
        """Run or skip the optimizer step on all ranks. Returns the gradient norm before clipping."""
        own_norm = self._plain_grad_norm()
        if own_norm is not None:
            self._skip_plainly(not math.isfinite(own_norm))
        skipped_before = self._engine.skipped_steps
        with named_shortage("taking an optimizer step", self.module, None):
            self._engine.step()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self._engine.skipped_steps > skipped_before else 0
        norm = own_norm if own_norm is not None else self._engine.get_global_grad_norm()
        assert norm is not None, "DeepSpeed reported no gradient norm"
        return float(norm)

    def _plain_grad_norm(self) -> float | None:
        """Return the gradient norm with a plain torch optimizer (fp32 at stage 0), otherwise None."""
        # In this case DeepSpeed has no optimizer wrapper, and therefore neither a norm nor an overflow check.
        if self._stage > 0 or self._engine.bfloat16_enabled():
            return None
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]))

    def _skip_plainly(self, skip: bool) -> None:
        """Make a plain torch optimizer skip the next step, or not."""
        # `found_inf` makes PyTorch's fused kernels skip the update. DeepSpeed reads `overflow` after the step: it
        # counts a skipped step and does not advance the schedule.
        self._engine.optimizer.found_inf = torch.ones((), device=distributed.device()) if skip else None
        self._engine.optimizer.overflow = skip

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[Any], compute_loss: ComputeLoss) -> dict[str, float]:
        """Compute the metrics from `compute_loss` over all micro-batches and ranks, without training."""
        self._engine.eval()
        total: Metrics = {}
        for micro_batch in micro_batches:
            with named_shortage("evaluating", self.module, micro_batch):
                total = combine_metrics(total, compute_loss(self._engine, micro_batch.to(distributed.device()))[1])
        return self._reduced(total)

    def _reduced(self, metrics: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Reduce metrics over all ranks."""
        own = {name: float(value) for name, value in metrics.items()}
        return distributed.reduce_metrics(own, ranks_per_pack=self._ranks_per_pack)

    @torch.no_grad()
    def infer(self, micro_batches: Sequence[Any], forward: Forward) -> list[torch.Tensor]:
        """Run `forward(model, micro_batch)` on this rank's micro-batches. Returns results on the CPU."""
        self._engine.eval()
        return inferred(self._engine, self.module, micro_batches, forward)

    def named_weights(
        self, part: nn.Module, *, bucket_bytes: int = BUCKET_BYTES, only_trained: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights (name, tensor) of a submodule. Every rank must iterate to the end.

        Under ZeRO-3, weights are gathered in buckets. Each tensor is valid only until the next iteration.
        """
        chosen = [(name, p) for name, p in part.named_parameters() if p.requires_grad or not only_trained]
        yield from self.whole(chosen, bucket_bytes=bucket_bytes)

    def whole(
        self, parameters: list[tuple[str, nn.Parameter]], *, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights like `named_weights`, for these named parameters."""
        yield from whole_weights(parameters, gather=self._stage == 3, bucket_bytes=bucket_bytes)

    def checkpoint_bytes(self) -> int:
        """Estimate the bytes that `save` writes on all ranks: trained weights and optimizer states."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return sum(math.prod(whole_shape(p)) * (p.element_size() + self._optimizer_bytes) for p in trained)

    def save(self, directory: Path) -> None:
        """Save trained weights, optimizer, schedule and RNG states in `directory`. Call it on all ranks.

        Frozen weights are excluded, because they are loaded from the model.
        """
        # `exclude_frozen_parameters` misses the second names of tied parameters, which the hook removes.
        with _without_frozen_weights(self.module):
            self._engine.save_checkpoint(
                str(directory), tag=DEEPSPEED, save_latest=False, exclude_frozen_parameters=True
            )
        write_layout(self._layout(), directory, rank=dist.get_rank())
        torch.save(random_states() | {"token_limit": self.token_limit}, directory / f"rng_rank{dist.get_rank()}.pt")
        # The driver publishes the checkpoint as soon as rank 0 returns, so all files must exist by then.
        distributed.barrier()

    def load(self, directory: Path) -> None:
        """Restore a checkpoint from `save`. With the same number of ranks and ZeRO stage, it is bit-identical.

        Otherwise, states are partitioned again. With a different number of ranks, RNG states cannot be restored: they
        start from this process's seed and the step number.
        """
        saved, own = read_layout(directory), self._layout()
        if saved.is_cut_as(own):
            path, _ = self._engine.load_checkpoint(str(directory), tag=DEEPSPEED, custom_load_fn=_load_trained_weights)
            assert path is not None, f"{directory} has no DeepSpeed checkpoint"
        else:
            load_cut_anew(self._engine, directory, own)
        # After loading, which restores the optimizer's learning rates from the checkpoint.
        set_rates(self._engine.optimizer, self._engine.lr_scheduler)
        if saved.num_ranks == own.num_ranks:
            state = torch.load(directory / f"rng_rank{dist.get_rank()}.pt", weights_only=False)
            set_random_states(state)
            self.token_limit = state.get("token_limit")
        else:
            seed_everything((torch.initial_seed() + self._engine.global_steps) % 2**32)

    def _layout(self) -> StateLayout:
        """Describe the layout of this rank's states."""
        return layout_of(self._engine, zero_stage=self._stage, tensor_parallel_size=self._ranks_per_layer)

    def sleep(self) -> None:
        """Move optimizer states, gradients and weights to host memory. No-op without a GPU."""
        if torch.cuda.is_available():
            self._states.leave(with_weights=True)
            # Return cached blocks to the driver, so that other processes on the GPU can allocate them.
            torch.cuda.empty_cache()

    def sleep_optimizer(self) -> None:
        """Move optimizer states and gradients to host memory, and keep the weights. No-op without a GPU."""
        if torch.cuda.is_available():
            self._states.leave(with_weights=False)
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move all states back to the GPU."""
        if torch.cuda.is_available():
            self._states.come_back()


def inferred(model: nn.Module, module: nn.Module, micro_batches: Sequence[Any], forward: Forward) -> list[torch.Tensor]:
    """Run `forward(model, micro_batch)` and return results on the CPU. `module` is the unwrapped model."""
    results = []
    for micro_batch in micro_batches:
        with named_shortage("computing a forward pass", module, micro_batch):
            results.append(forward(model, micro_batch.to(distributed.device())).cpu())
    note_peak("forward")
    return results


def _spreading_nan(loss: torch.Tensor) -> torch.Tensor:
    """Replace a non-finite loss by NaN with NaN gradients."""
    # An infinite loss can have finite gradients. NaN gradients reach all ranks through the gradient norm, so that all
    # ranks skip the step without an additional collective.
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def _undo_first_step(optimizer: Any) -> None:
    """Undo the initial optimizer step with zero gradients that DeepSpeed runs at stage 0 in bf16."""
    # DeepSpeed steps to allocate Adam's moments. This step decays the weights and counts in Adam's bias correction,
    # which would make the first real step smaller.
    for state in optimizer.optimizer.state.values():
        # Muon's momentum state has no step count. In-place, because it is a tensor, or a number with bitsandbytes.
        if "step" in state:
            state["step"] *= 0
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def register_external_parameters(module: nn.Module) -> None:
    """Register parameters that are used outside their module, so that ZeRO-3 gathers them there."""
    head = module.external_parameters() if isinstance(module, LanguageModel) else []
    for user, parameter in [*head, *weights_read_by_others(module)]:
        deepspeed.zero.register_external_parameter(user, parameter)


def _frozen_names(module: nn.Module) -> set[str]:
    """Return the names of frozen parameters, including all names of tied ones."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


@contextmanager
def _without_frozen_weights(module: nn.Module) -> Iterator[None]:
    """Exclude frozen weights from the module's state dict inside the block."""
    frozen = _frozen_names(module)

    def drop(_: nn.Module, state: dict[str, object], prefix: str, __: object) -> None:
        for name in frozen:
            state.pop(prefix + name, None)

    hook = module.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        hook.remove()


def _load_trained_weights(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
    """Load a state dict that contains exactly the trained weights."""
    result = dst.load_state_dict(src, strict=False)
    mismatched = (set(result.missing_keys) - _frozen_names(dst)) | set(result.unexpected_keys)
    assert not mismatched, f"checkpoint and model have different weights: {sorted(mismatched)}"


def whole_weights(
    parameters: list[tuple[str, nn.Parameter]], *, gather: bool, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor). With `gather`, parameters are gathered in buckets."""
    if not gather:
        yield from ((name, _joined(parameter)) for name, parameter in parameters)
        return
    for bucket in buckets(parameters, bucket_bytes):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
            yield from ((name, _joined(parameter)) for name, parameter in bucket)


def buckets(
    parameters: list[tuple[str, nn.Parameter]], limit: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Group parameters, in order, into buckets of up to `limit` bytes, with at least one parameter each."""
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        # Under ZeRO-3, `numel` of a partitioned parameter is 0; `ds_numel` is the full size.
        num_bytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bucket and size + num_bytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += num_bytes
    if bucket:
        yield bucket


def _tensor_parallel_config(module: nn.Module, size: int) -> dict[str, object]:
    """Return the DeepSpeed config entries that split the model over `size` ranks; {} for one rank."""
    if size == 1:
        return {}
    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    layers = {"use_default_specs": False, "layer_specs": split_layers(model.config)}
    return {"tensor_parallel": {"autotp_size": size, "partition_config": layers}}


@torch.no_grad()
def _joined(parameter: nn.Parameter) -> torch.Tensor:
    """Return a full parameter. If it is split, it is gathered, so call it on all ranks."""
    own, dimension = parameter.detach(), split_dimension(parameter)
    if dimension is None:
        return own
    group = groups.get_tensor_model_parallel_group()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=dimension)
