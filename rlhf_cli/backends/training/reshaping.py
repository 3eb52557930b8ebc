"""Loads training states at a different ZeRO stage or number of ranks than they were saved with.

DeepSpeed loads files only at the same stage with the same number of ranks. Universal checkpoints do not support stage
0, cannot change from or to stage 3, and apply the first group's settings to all groups at stage 3. Here, each rank
reads the required elements from the saved files into its flat tensors, and DeepSpeed loads the result as a normal state
dict.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_cli.backends.training.checkpoint_layout import Fragment, Shard, StateLayout
from rlhf_cli.backends.training.saved_states import MASTER, SavedStates, StateDict, base_states
from rlhf_cli.models.tensor_parallel import split_dimension

_Engine = Any
"""DeepSpeed's engine, which is untyped."""
_Optimizer = Any
"""DeepSpeed's optimizer, with a different class for each stage and dtype, or the torch optimizer inside it."""

_STEP = "step"
"""Key of the step count in a torch optimizer's state."""


def layout_of(engine: _Engine, *, zero_stage: int, tensor_parallel_size: int = 1) -> StateLayout:
    """Describe the layout of this rank's states in a DeepSpeed engine."""
    base = _base(engine.optimizer)
    states = ((flat, base.state.get(flat, {})) for flat in _flats(engine.optimizer, zero_stage))
    uncut = {key for flat, state in states for key, value in state.items() if not _can_be_cut(key, value, flat)}
    fragments = _fragments(engine, zero_stage)
    size = tensor_parallel_size
    shards = _shards(engine.module) if size > 1 else {}
    return StateLayout(zero_stage, dist.get_world_size(), type(base).__name__, sorted(uncut), fragments, size, shards)


@torch.no_grad()
def load_cut_anew(engine: _Engine, directory: Path, layout: StateLayout) -> None:
    """Load states saved with another layout into an engine with `layout`. Call it on all ranks."""
    saved, optimizer = SavedStates(directory), engine.optimizer
    assert not saved.uncut_states, f"{saved.uncut_states} cannot be partitioned again"
    mismatched = saved.names() ^ _trained_names(engine.module)
    assert not mismatched, f"checkpoint and model have different weights: {sorted(mismatched)}"
    # Stage 3: partitions weights that are still gathered, as DeepSpeed does before loading.
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    flats = _flats(optimizer, layout.zero_stage)
    for fragment in layout.fragments:
        saved.fill(_part(flats[fragment.flat], fragment), name=fragment.name, key=MASTER, start=fragment.start)
    state_dict = optimizer.state_dict()
    base_states(state_dict)["state"] = {
        number: _state(flat, [f for f in layout.fragments if f.flat == number], saved, _base(optimizer))
        for number, flat in enumerate(flats)
    }
    _load(optimizer, state_dict, is_partitioned=layout.zero_stage > 0)
    _take_over_masters(optimizer)
    _restore_common(engine, saved.common)
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()


def _base(optimizer: _Optimizer) -> _Optimizer:
    """Return the torch optimizer inside DeepSpeed's. In fp32 at stage 0, there is no wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _can_be_cut(key: str, value: object, flat: torch.Tensor) -> bool:
    """Return whether a state can be partitioned: the step count, or an elementwise state."""
    return key == _STEP or (isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel())


def _trained_names(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def _shards(module: torch.nn.Module) -> dict[str, Shard]:
    """Return this tensor-parallel rank's shards of all parameters."""
    return {
        name: Shard(list(getattr(parameter, "ds_shape", parameter.shape)), split_dimension(parameter))
        for name, parameter in module.named_parameters()
    }


def _flats(optimizer: _Optimizer, zero_stage: int) -> list[torch.Tensor]:
    """Return the tensors that the torch optimizer updates, in state dict order."""
    if zero_stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _fragments(engine: _Engine, zero_stage: int) -> list[Fragment]:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if zero_stage == 3:
        return _fragments_of_partitions(engine.optimizer.fp16_groups, names)
    if zero_stage > 0:
        return _fragments_of_mappings(engine.module)
    groups = getattr(engine.optimizer, "fp16_groups", None) or [g["params"] for g in engine.optimizer.param_groups]
    parameters = list(chain.from_iterable(groups))
    return [Fragment(names[id(p)], 0, p.numel(), number, 0) for number, p in enumerate(parameters)]


def _fragments_of_mappings(module: torch.nn.Module) -> list[Fragment]:
    """Return the fragments at stages 1 and 2: each parameter group is concatenated and split into one part per rank."""
    named = ((name, getattr(parameter, "_hp_mapping", None)) for name, parameter in module.named_parameters())
    return [
        Fragment(
            name,
            mapping.lp_fragment_address.start,
            mapping.lp_fragment_address.numel,
            mapping.param_group_index,
            mapping.hp_fragment_address.start,
        )
        for name, mapping in named
        if mapping is not None
    ]


def _fragments_of_partitions(groups: Sequence[Sequence[Any]], names: dict[int, str]) -> list[Fragment]:
    """Return the fragments at stage 3: each parameter is split into one part per rank, and parts are concatenated."""
    fragments = []
    for number, group in enumerate(groups):
        offset = 0
        for parameter in group:
            size = parameter.partition_numel()
            start = dist.get_rank(parameter.ds_process_group) * size
            # The last ranks may have only padding.
            length = min(size, parameter.ds_numel - start)
            if length > 0:
                fragments.append(Fragment(names[id(parameter)], start, length, number, offset))
            offset += size
    return fragments


def _part(flat: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return flat.data.view(-1)[fragment.offset : fragment.offset + fragment.length]


def _state(flat: torch.Tensor, fragments: list[Fragment], saved: SavedStates, base: _Optimizer) -> StateDict:
    """Assemble the torch optimizer's state for a flat tensor. Padding is zero."""
    state: StateDict = {}
    for key, example in saved.first_state(fragment.name for fragment in fragments).items():
        if key == _STEP:
            state[key] = _count(int(example), base)
            continue
        state[key] = torch.zeros(flat.shape, dtype=example.dtype)
        for fragment in fragments:
            saved.fill(_part(state[key], fragment), name=fragment.name, key=key, start=fragment.start)
    return state


def _count(number: int, base: _Optimizer) -> int | torch.Tensor:
    """Convert a step count to the optimizer's type."""
    # torch optimizers store a tensor, but DeepSpeed's kernels require an int.
    return number if type(base).__module__.startswith("deepspeed.ops") else torch.tensor(float(number))


def _load(optimizer: _Optimizer, state_dict: StateDict, *, is_partitioned: bool) -> None:
    # ZeRO optimizers expect a list with one state dict per rank and select this rank's.
    if is_partitioned:
        by_rank = [state_dict] * dist.get_world_size()
        optimizer.load_state_dict(by_rank, load_optimizer_states=True, load_from_fp32_weights=True)
    else:
        optimizer.load_state_dict(state_dict)


def _take_over_masters(optimizer: _Optimizer) -> None:
    """Copy master weights to the model's weights where DeepSpeed does not do it on loading."""
    # Stages 1 and 2.
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    # Stage 0 in bf16.
    elif hasattr(optimizer, "fp32_groups"):
        pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        for weight, master in pairs:
            weight.data.copy_(master.data)


def _restore_common(engine: _Engine, common: StateDict) -> None:
    """Restore learning rate schedule, current learning rates and step counts."""
    engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
    for group, rate in zip(_base(engine.optimizer).param_groups, engine.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    engine.global_steps, engine.skipped_steps = common["global_steps"], common["skipped_steps"]
    engine.global_samples = common.get("global_samples", engine.global_samples)
