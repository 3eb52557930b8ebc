"""A model under DeepSpeed: one optimizer step over packed micro-batches, its states on disk and off the device.

The caller's loss is already divided by the global number of tokens (or sequences) of the step, so gradients are
summed over micro-batches and ranks; DeepSpeed averages over ranks, which is undone here. How a step is cut into
micro-batches therefore does not change the update.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, combine_metrics
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.checkpoint_layout import DEEPSPEED, StateLayout, read_layout, write_layout
from rlhf_cli.backends.training.deepspeed_config import OPTIMIZER_BYTES, deepspeed_config
from rlhf_cli.backends.training.memory import named_shortage
from rlhf_cli.backends.training.optimizers import fit_to_partitions, make_optimizer, make_schedule, set_rates
from rlhf_cli.backends.training.reshaping import layout_of, load_cut_anew
from rlhf_cli.backends.training.router_loss import RouterLoss
from rlhf_cli.backends.training.sleep import HostCopies, TrainedStates
from rlhf_cli.backends.training.tensor_ranks import joined, tensor_parallel_config
from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.models.adapters import weights_read_by_others
from rlhf_cli.models.policy import LanguageModel
from rlhf_cli.models.tensor_parallel import whole_shape

ComputeLoss = Callable[[nn.Module, Any], tuple[torch.Tensor, Metrics]]
Forward = Callable[[nn.Module, Any], torch.Tensor]

BUCKET_BYTES = 1 << 28
"""Weights that are whole at a time under ZeRO-3."""


class DeepSpeedEngine:
    """Owns one rank's share of a trained model, its optimizer and its learning rate schedule."""

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
        config |= tensor_parallel_config(module, settings.tensor_parallel_size)
        module.to(distributed.device())
        optimizer = make_optimizer(module, settings, learning_rate=learning_rate, optim=optim, sleeps=sleeps)
        scheduler = make_schedule(optimizer, optim, total_steps=total_steps)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=config,
        )
        if settings.tensor_parallel_size > 1:
            self._engine.first_dataloader_check.remove()  # it compares tensors alone, and packs are none
        self._stage = settings.zero_stage
        self._ranks_per_pack = settings.ranks_per_pack
        self._ranks_per_layer = settings.tensor_parallel_size
        self._states = TrainedStates(self._engine, module, device=distributed.device())
        self._skipped_in_a_row = 0
        routers = getattr(module, "routers", None) if optim.aux_loss_coef else None
        self._router_loss = None if routers is None else RouterLoss(routers, optim.aux_loss_coef)
        if self._stage == 3:
            register_external_parameters(module)
        if self._stage == 0 and self._engine.bfloat16_enabled():
            undo_first_step(self._engine.optimizer)
        if self._stage in (1, 2):
            fit_to_partitions(optimizer, self._engine.optimizer)
        self._optimizer_bytes = OPTIMIZER_BYTES[optim.optim]

    @property
    def module(self) -> nn.Module:
        """The wrapped model; its forward must go through the engine's methods."""
        return self._engine.module

    def train_step(self, micro_batches: Sequence[Any], compute_loss: ComputeLoss) -> dict[str, float]:
        """Take one optimizer step; return the metrics of the whole step over all ranks, `grad_norm` and `lr`.

        If a loss or the gradient is not finite, no rank changes anything: `skipped_steps` counts such steps of the run,
        `skipped_in_a_row` those since the last good one, or since the start of this process.

        Args:
            micro_batches: this rank's share; every rank has the same number.
            compute_loss: (model, micro-batch) -> (loss, metrics), both as this micro-batch's additive part of the
                global mean; metrics whose name ends in `_max` are combined as maxima.
        """
        metrics = self._accumulate_gradients(micro_batches, compute_loss)
        lr = self._engine.get_lr()[0]  # before the step, which moves the schedule
        norm = self._optimizer_step()
        reduced = self._reduced(metrics)
        return reduced | {
            "grad_norm": norm,
            "lr": float(lr),
            "skipped_steps": float(self._engine.skipped_steps),
            "skipped_in_a_row": float(self._skipped_in_a_row),
        }

    def _accumulate_gradients(self, micro_batches: Sequence[Any], compute_loss: ComputeLoss) -> Metrics:
        """Run forward and backward of all micro-batches; return this rank's metrics."""
        self._engine.train()
        if self._router_loss is not None:
            compute_loss = self._router_loss.added_to(compute_loss, model=self._engine, micro_batches=micro_batches)
        total: Metrics = {}
        for index, micro_batch in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            with named_shortage("training", self.module, micro_batch):
                loss, metrics = compute_loss(self._engine, micro_batch.to(distributed.device()))
                # Ranks that split layers have parts of one gradient: DeepSpeed averages over groups of them.
                num_gradients = dist.get_world_size() // self._ranks_per_layer
                self._engine.backward(spreading_nan(loss) * num_gradients)
            total = combine_metrics(total, metrics)
        return total

    def _optimizer_step(self) -> float:
        """Let the optimizer step, or skip the step on every rank; return the gradient norm before clipping."""
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
        """Return the gradient norm where DeepSpeed leaves the step to the plain optimizer (fp32 at stage 0), else
        None.
        """
        if self._stage > 0 or self._engine.bfloat16_enabled():
            return None
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]))

    def _skip_plainly(self, skip: bool) -> None:
        """If the step is the plain optimizer's, pass to its fused kernel, and to DeepSpeed, whether it is skipped."""
        self._engine.optimizer.found_inf = torch.ones((), device=distributed.device()) if skip else None
        self._engine.optimizer.overflow = skip

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[Any], compute_loss: ComputeLoss) -> dict[str, float]:
        """Return the metrics of `compute_loss` over all micro-batches of all ranks, without training."""
        self._engine.eval()
        total: Metrics = {}
        for micro_batch in micro_batches:
            with named_shortage("evaluating", self.module, micro_batch):
                total = combine_metrics(total, compute_loss(self._engine, micro_batch.to(distributed.device()))[1])
        return self._reduced(total)

    def _reduced(self, metrics: Metrics) -> dict[str, float]:
        """Return the metrics over all ranks."""
        own = {name: float(value) for name, value in metrics.items()}
        return distributed.reduce_metrics(own, ranks_per_pack=self._ranks_per_pack)

    @torch.no_grad()
    def infer(self, micro_batches: Sequence[Any], forward: Forward) -> list[torch.Tensor]:
        """Return the results of `forward(model, micro_batch)` on this rank's micro-batches, on the CPU."""
        self._engine.eval()
        return _inferred(self._engine, self.module, micro_batches, forward)

    def named_weights(
        self, part: nn.Module, *, bucket_bytes: int = BUCKET_BYTES, only_trained: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights (name, tensor) of a part of the module; every rank must iterate to the end.

        Under ZeRO-3 they are gathered bucket by bucket and valid only until the next one is asked for.
        """
        chosen = [(name, p) for name, p in part.named_parameters() if p.requires_grad or not only_trained]
        yield from self.whole(chosen, bucket_bytes=bucket_bytes)

    def whole(
        self, parameters: list[tuple[str, nn.Parameter]], *, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same for parameters of the module under given names."""
        yield from whole_weights(parameters, gather=self._stage == 3, bucket_bytes=bucket_bytes)

    def checkpoint_bytes(self) -> int:
        """Return the bytes that `save` writes over all ranks: trained weights and all that the optimizer holds."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return sum(math.prod(whole_shape(p)) * (p.element_size() + self._optimizer_bytes) for p in trained)

    def save(self, directory: Path) -> None:
        """Write trained weights, optimizer, schedule and RNG states of all ranks below `directory`; all call it.

        Frozen weights are left out: they are those the model was loaded with.
        """
        with without_frozen_weights(self.module):
            self._engine.save_checkpoint(
                str(directory), tag=DEEPSPEED, save_latest=False, exclude_frozen_parameters=True
            )
        write_layout(self._layout(), directory, rank=dist.get_rank())
        torch.save(rng_state(), directory / f"rng_rank{dist.get_rank()}.pt")
        distributed.barrier()

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, to the bit on the same number of ranks and at the same stage.

        Else states are cut anew. Of another number of ranks there are no random states to restore: they start from this
        process's seed and the number of steps.
        """
        saved, own = read_layout(directory), self._layout()
        if saved.is_cut_as(own):
            path, _ = self._engine.load_checkpoint(str(directory), tag=DEEPSPEED, custom_load_fn=load_trained_weights)
            assert path is not None, f"{directory} has no DeepSpeed checkpoint"
        else:
            load_cut_anew(self._engine, directory, own)
        set_rates(self._engine.optimizer, self._engine.lr_scheduler)
        if saved.num_ranks == own.num_ranks:
            set_rng_state(torch.load(directory / f"rng_rank{dist.get_rank()}.pt", weights_only=False))
        else:
            seed_everything((torch.initial_seed() + self._engine.global_steps) % 2**32)

    def _layout(self) -> StateLayout:
        """Return where this rank's states lie."""
        return layout_of(self._engine, zero_stage=self._stage, tensor_parallel_size=self._ranks_per_layer)

    def sleep(self) -> None:
        """Move optimizer states, gradients and weights to host memory; a no-op without an accelerator."""
        if torch.cuda.is_available():
            self._states.leave(with_weights=True)
            torch.cuda.empty_cache()

    def sleep_optimizer(self) -> None:
        """Move all but the low-precision weights to host memory; a no-op without an accelerator."""
        if torch.cuda.is_available():
            self._states.leave(with_weights=False)
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring back what `sleep` moved away."""
        if torch.cuda.is_available():
            self._states.come_back()


class FrozenEngine:
    """Owns one rank's share of a model that is only read: partitioned under ZeRO-3, else whole.

    With `param_offload` whole weights are in host memory but while they are used; DeepSpeed does so with partitioned
    ones, layer by layer. `staying` are parameters that never leave the device if they are whole.
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
        """Return the results of `forward(model, micro_batch)` on this rank's micro-batches, on the CPU."""
        with self._on_device():
            return _inferred(self._module, self._module, micro_batches, forward)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Within the block weights that are kept in host memory are on the device."""
        if not self._is_offloaded:
            yield
            return
        self._weights.come_back(distributed.device())
        try:
            yield
        finally:
            self._weights.leave()

    def sleep(self) -> None:
        """Move whole weights to host memory; partitioned ones stay, being small on every rank."""
        if not self._partitioned and torch.cuda.is_available():
            self._weights.leave()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring back what `sleep` moved away."""
        if not self._is_offloaded:
            self._weights.come_back(distributed.device())


def _inferred(
    model: nn.Module, module: nn.Module, micro_batches: Sequence[Any], forward: Forward
) -> list[torch.Tensor]:
    """Return the results of `forward(model, micro_batch)`, on the CPU; `module` is the model without its engine."""
    results = []
    for micro_batch in micro_batches:
        with named_shortage("computing a forward pass", module, micro_batch):
            results.append(forward(model, micro_batch.to(distributed.device())).cpu())
    return results


def spreading_nan(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, or NaN with gradients of NaN if it is not finite, which every rank sees in the gradient's
    norm.
    """
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def undo_first_step(optimizer: Any) -> None:
    """Take back the step with zero gradients that DeepSpeed's stage 0 in bf16 makes to allocate Adam's moments.

    It decays the weights once and counts as a step in Adam's bias correction, which makes the first real one smaller.
    """
    for state in optimizer.optimizer.state.values():
        if "step" in state:  # Muon's momentum has none
            state["step"] *= 0  # a tensor, or bitsandbytes' number
    for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def register_external_parameters(module: nn.Module) -> None:
    """Register parameters with ZeRO-3 that are used outside the module that owns them."""
    head = module.external_parameters() if isinstance(module, LanguageModel) else []
    for user, parameter in [*head, *weights_read_by_others(module)]:
        deepspeed.zero.register_external_parameter(user, parameter)


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of parameters that are not trained, each under all its names."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


@contextmanager
def without_frozen_weights(module: nn.Module) -> Iterator[None]:
    """Within the block the state dict has no frozen weights; DeepSpeed itself forgets the second names of tied ones."""
    frozen = frozen_names(module)

    def drop(_: nn.Module, state: dict[str, object], prefix: str, __: object) -> None:
        for name in frozen:
            state.pop(prefix + name, None)

    hook = module.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        hook.remove()


def load_trained_weights(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
    """Load a state dict that has every weight of the module but frozen ones."""
    result = dst.load_state_dict(src, strict=False)
    others = (set(result.missing_keys) - frozen_names(dst)) | set(result.unexpected_keys)
    assert not others, f"the checkpoint has other weights than the model: {sorted(others)}"


def whole_weights(
    parameters: list[tuple[str, nn.Parameter]], *, gather: bool, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of the parameters."""
    if not gather:
        yield from ((name, joined(parameter)) for name, parameter in parameters)
        return
    for bucket in buckets(parameters, bucket_bytes):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
            yield from ((name, joined(parameter)) for name, parameter in bucket)


@torch.no_grad()
def move_weights(module: nn.Module, towards: Mapping[str, torch.Tensor], alpha: float) -> None:
    """Make the named parameters `alpha` of the given whole tensors and the rest of their own; all ranks call it.

    Of partitioned ones the first rank's tensors count.
    """
    own = dict(module.named_parameters())
    for name, weight in towards.items():
        parameter = own[name]
        if not hasattr(parameter, "ds_tensor"):
            parameter.lerp_(weight.to(parameter.device), alpha)
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.lerp_(weight.to(parameter.device), alpha)


def buckets(
    parameters: list[tuple[str, nn.Parameter]], limit: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield the parameters in their order, as many at a time as have no more bytes than `limit`, and at least one."""
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        num_bytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bucket and size + num_bytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += num_bytes
    if bucket:
        yield bucket


def rng_state() -> dict[str, object]:
    """Return every random generator's state of this process."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Set what `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed every random generator of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
