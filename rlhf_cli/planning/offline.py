"""Workload of an offline training command."""

from collections.abc import Collection
from dataclasses import replace

from rlhf_cli.backends.cluster.placement import Island, Layout, Seat
from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.commands.kto import KTOConfig
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.config.preference import PAIR_LOSSES
from rlhf_cli.config.teachers import teachers_of
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.images import row_images
from rlhf_cli.planning.workload import (
    Shapes,
    Tokens,
    Workload,
    adapter_rank,
    check_states,
    frozen_role,
    trained_role,
    trains_vision,
    with_trained,
)

MODEL, REFERENCE, TEACHER = "model", "reference", "teacher"


def offline_work(config: OfflineConfig, plan: PlanConfig, hardware: Hardware, shapes: Shapes) -> Workload:
    """Return the workload of an offline command. Raises UsageError if it needs more GPUs than the hardware has."""
    num_ranks = config.launch.num_processes if hardware.num_nodes == 1 else hardware.total_gpus
    if num_ranks > hardware.total_gpus:
        raise UsageError(
            f"--num_processes {num_ranks} needs as many GPUs, but the plan has {hardware.total_gpus}: lower it, or set "
            f"--num_gpus {num_ranks}"
        )
    check_states(config, config.deepspeed)
    images = row_images(config, plan)
    length = images.mean_length(plan.row_tokens, config.data.max_len)
    shape = images.added_to(shapes(config.model.pretrain), length, trains=trains_vision(config))
    roles = {MODEL: trained_role(config, shape, config.deepspeed, num_ranks, hardware)}
    if config.command in ("rm", "prm"):
        roles[MODEL] = replace(roles[MODEL], shape=roles[MODEL].shape.with_score_head())
        roles[MODEL] = with_trained(roles[MODEL], config)
    frozen = _offline_frozen(config)
    for name, (pretrain, settings) in frozen.items():
        roles[name] = frozen_role(roles[MODEL], images.added_to(shapes(pretrain), length), settings, num_ranks)
    per_node = -(-num_ranks // hardware.num_nodes)
    islands = tuple(Island(node, per_node) for node in range(hardware.num_nodes))
    seats = [
        Seat(name, rank, rank // per_node, (rank % per_node,), len(roles) > 1)
        for name in roles
        for rank in range(num_ranks)
    ]
    rows = config.batch.train_batch_size
    sequences = sequences_per_row(config)
    tokens = rows * sequences * length
    steps = None if plan.num_rows is None else -(-plan.num_rows // rows) * config.batch.max_epochs
    if config.batch.max_steps is not None:
        steps = min(steps or config.batch.max_steps, config.batch.max_steps)
    return Workload(
        config=config,
        hardware=hardware,
        roles=roles,
        layout=Layout(islands, tuple(seats)),
        tokens=Tokens(trained=tokens, forward=_forwards(config, frozen, tokens), length=length),
        longest=-(-config.data.max_len * sequences // config.deepspeed.sequence_parallel_size),
        steps=steps,
        hosts=dict.fromkeys(frozen, MODEL),
        images=images,
    )


def sequences_per_row(config: OfflineConfig) -> int:
    """Return the sequences in a row of the data: two in a pair of responses."""
    return 2 if config.command in ("dpo", "rm") else 1


def _offline_frozen(config: OfflineConfig) -> dict[str, tuple[str, DeepSpeedConfig]]:
    """Return the frozen models of an offline command: name, model and DeepSpeed settings."""
    common = config.deepspeed.model_copy(update={"tensor_parallel_size": 1})
    if isinstance(config, DistillConfig):
        own, settings = config.distillation.teacher_zero_stage, config.distillation
        stage = common.zero_stage if own is None else own
        teachers = teachers_of(settings.teacher_pretrain, settings.teacher_by_source)
        # Several whole teachers take turns on the GPU.
        offload = settings.teacher_offload or (common.param_offload if stage == 3 else len(teachers) > 1)
        deepspeed = common.model_copy(update={"zero_stage": stage, "param_offload": offload})
        names = [TEACHER, *(f"{TEACHER} {number}" for number in range(2, len(teachers) + 1))]
        return {name: (teacher, deepspeed) for name, teacher in zip(names, teachers, strict=True)}
    if not isinstance(config, DPOConfig | KTOConfig) or not _needs_reference(config):
        return {}
    reference = config.reference
    if reference.precompute_ref_log_probs or _is_own_reference(config):
        return {}
    update = {"param_offload": common.param_offload or reference.ref_offload}
    return {REFERENCE: (reference.ref_pretrain or config.model.pretrain, common.model_copy(update=update))}


def _needs_reference(config: DPOConfig | KTOConfig) -> bool:
    if isinstance(config, KTOConfig):
        return True
    return any(PAIR_LOSSES[loss].needs_reference for loss in config.preference.loss if loss in PAIR_LOSSES)


def _is_own_reference(config: DPOConfig | KTOConfig) -> bool:
    """Return whether the reference is the trained model without its adapter."""
    return adapter_rank(config) > 0 and config.reference.ref_pretrain is None


def _forwards(config: OfflineConfig, frozen: Collection[str], tokens: float) -> dict[str, float]:
    """Return the tokens of forward passes in an offline step: of frozen models, and of a model without its adapter."""
    roles = [*frozen]
    if isinstance(config, DPOConfig | KTOConfig) and not config.reference.precompute_ref_log_probs:
        roles += [MODEL] if _needs_reference(config) and _is_own_reference(config) else []
    # Assume that each of several teachers scores an equal share of the tokens.
    return dict.fromkeys(roles, tokens / len(frozen) if isinstance(config, DistillConfig) else tokens)
