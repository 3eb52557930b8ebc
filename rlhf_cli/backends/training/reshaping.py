"""States of a trained engine cut anew: saved at one ZeRO stage by some ranks, loaded at any stage by any number.

DeepSpeed loads its files on the same ranks and stage alone; its universal checkpoints take no stage 0, do not cross
from stage 3, and give all groups of stage 3 the settings of the first. Here each rank takes its own elements from the
saved files, writes them into its own flat tensors, and lets DeepSpeed load the result as its own state dict.
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

Engine = Any
"""DeepSpeed's engine, which has no types."""
Optimizer = Any
"""Its optimizer: of another class for each stage and type, without a common one; or the torch optimizer under it."""

STEP = "step"
"""The torch optimizer's name for its count of steps."""


def layout_of(engine: Engine, *, zero_stage: int, tensor_parallel_size: int = 1) -> StateLayout:
    """Return the layout of this rank's states in a DeepSpeed engine."""
    base = _base(engine.optimizer)
    states = ((flat, base.state.get(flat, {})) for flat in _flats(engine.optimizer, zero_stage))
    uncut = {key for flat, state in states for key, value in state.items() if not _can_be_cut(key, value, flat)}
    fragments = _fragments(engine, zero_stage)
    size = tensor_parallel_size
    shards = _shards(engine.module) if size > 1 else {}
    return StateLayout(zero_stage, dist.get_world_size(), type(base).__name__, sorted(uncut), fragments, size, shards)


@torch.no_grad()
def load_cut_anew(engine: Engine, directory: Path, layout: StateLayout) -> None:
    """Give a DeepSpeed engine of this layout the states that an engine of another one saved; every rank calls it."""
    saved, optimizer = SavedStates(directory), engine.optimizer
    assert not saved.uncut_states, f"{saved.uncut_states} cannot be cut anew"
    others = saved.names() ^ _trained_names(engine.module)
    assert not others, f"the checkpoint has other weights than the model: {sorted(others)}"
    if hasattr(optimizer, "checkpoint_event_prologue"):  # stage 3: partitions weights that are whole
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


def _base(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer under DeepSpeed's, which fp32 at stage 0 does without."""
    return getattr(optimizer, "optimizer", optimizer)


def _can_be_cut(key: str, value: object, flat: torch.Tensor) -> bool:
    """Return whether a state is the count of steps, or has one element for each element of its flat tensor."""
    return key == STEP or (isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel())


def _trained_names(module: torch.nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def _shards(module: torch.nn.Module) -> dict[str, Shard]:
    """Return the parts of the trained parameters that this rank has among the ranks that split layers."""
    return {
        name: Shard(list(getattr(parameter, "ds_shape", parameter.shape)), split_dimension(parameter))
        for name, parameter in module.named_parameters()
    }


def _flats(optimizer: Optimizer, zero_stage: int) -> list[torch.Tensor]:
    """Return the tensors that the torch optimizer updates, in the order of its state dict."""
    if zero_stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _fragments(engine: Engine, zero_stage: int) -> list[Fragment]:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if zero_stage == 3:
        return _fragments_of_partitions(engine.optimizer.fp16_groups, names)
    if zero_stage > 0:
        return _fragments_of_mappings(engine.module)
    groups = getattr(engine.optimizer, "fp16_groups", None) or [g["params"] for g in engine.optimizer.param_groups]
    parameters = list(chain.from_iterable(groups))
    return [Fragment(names[id(p)], 0, p.numel(), number, 0) for number, p in enumerate(parameters)]


def _fragments_of_mappings(module: torch.nn.Module) -> list[Fragment]:
    """Return the fragments at stages 1 and 2: each group of parameters end to end, cut into one part a rank."""
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
    """Return the fragments at stage 3: each parameter cut into one part a rank, these parts end to end."""
    fragments = []
    for number, group in enumerate(groups):
        offset = 0
        for parameter in group:
            size = parameter.partition_numel()
            start = dist.get_rank(parameter.ds_process_group) * size
            length = min(size, parameter.ds_numel - start)  # the last parts may be padding
            if length > 0:
                fragments.append(Fragment(names[id(parameter)], start, length, number, offset))
            offset += size
    return fragments


def _part(flat: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return flat.data.view(-1)[fragment.offset : fragment.offset + fragment.length]


def _state(flat: torch.Tensor, fragments: list[Fragment], saved: SavedStates, base: Optimizer) -> StateDict:
    """Return the torch optimizer's state of a flat tensor; elements of padding are zero."""
    state: StateDict = {}
    for key, example in saved.first_state(fragment.name for fragment in fragments).items():
        if key == STEP:
            state[key] = _count(int(example), base)
            continue
        state[key] = torch.zeros(flat.shape, dtype=example.dtype)
        for fragment in fragments:
            saved.fill(_part(state[key], fragment), name=fragment.name, key=key, start=fragment.start)
    return state


def _count(number: int, base: Optimizer) -> int | torch.Tensor:
    """Return a count of steps as the torch optimizer keeps it: DeepSpeed's own kernels take no tensor."""
    return number if type(base).__module__.startswith("deepspeed.ops") else torch.tensor(float(number))


def _load(optimizer: Optimizer, state_dict: StateDict, *, is_partitioned: bool) -> None:
    if is_partitioned:  # DeepSpeed picks this rank's from a list
        by_rank = [state_dict] * dist.get_world_size()
        optimizer.load_state_dict(by_rank, load_optimizer_states=True, load_from_fp32_weights=True)
    else:
        optimizer.load_state_dict(state_dict)


def _take_over_masters(optimizer: Optimizer) -> None:
    """Round the master weights to the weights that the model computes with, if DeepSpeed has not done it yet."""
    if hasattr(optimizer, "update_lp_params"):  # stages 1 and 2
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):  # stage 0 in bf16
        pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        for weight, master in pairs:
            weight.data.copy_(master.data)


def _restore_common(engine: Engine, common: StateDict) -> None:
    """Restore the schedule, with the learning rates that it has come to, and the counts of steps."""
    engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
    for group, rate in zip(_base(engine.optimizer).param_groups, engine.lr_scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    engine.global_steps, engine.skipped_steps = common["global_steps"], common["skipped_steps"]
    engine.global_samples = common.get("global_samples", engine.global_samples)
