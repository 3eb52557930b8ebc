"""Workload of an online training command: its roles, their placement, and the tokens of an iteration."""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from rlhf_cli.backends.cluster.default_layout import LayoutNeeds, memory_share
from rlhf_cli.backends.cluster.placement import Layout
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.placement import LayoutSettings
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.config.roles import FROZEN_POLICY, Role
from rlhf_cli.errors import UsageError
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.images import RowImages, row_images
from rlhf_cli.planning.memory import RoleMemory
from rlhf_cli.planning.workload import (
    Shapes,
    Tokens,
    Workload,
    adapter_rank,
    check_states,
    engine_of,
    frozen_role,
    judge_of,
    mean_lengths,
    trained_role,
    trains_vision,
)

_ENDS = 16
"""Extra tokens that a role may read after the longest sequence: a separator, or one more state."""


def layout_needs(config: OnlineConfig, roles: Sequence[str]) -> LayoutNeeds:
    """Return the layout requirements of the settings, for these roles."""
    settings = [config.deepspeed_of(role) for role in roles]
    groups = [of.ranks_per_pack for of in settings] + [of.zpg for of in settings if of.zero_stage == 3]
    return LayoutNeeds(lcm(*groups), samples_ahead=config.asynchronous.staleness > 0, can_sleep=_can_sleep(config))


def _can_sleep(config: OnlineConfig) -> bool:
    """Return whether DeepSpeed can offload the states of trained models with these settings."""
    try:
        for role in config.trained_roles:
            settings = config.deepspeed_of(role)
            check_deepspeed(settings, param_dtype=config.model.param_dtype, optimizer=config.optim.optim, sleeps=True)
    except UsageError:
        return False
    return True


def online_work(
    config: OnlineConfig,
    plan: PlanConfig,
    hardware: Hardware,
    shapes: Shapes,
    *,
    has_critic: bool,
    layout: Layout,
) -> Workload:
    """Return the workload of an online command whose sizes and sleep settings are filled in."""
    names, images = online_models(config, has_critic=has_critic), row_images(config, plan)
    tokens = _online_tokens(config, plan, list(names), images)
    # Prompts that samples share are computed once, with their images.
    is_shared = config.batch.share_prompts
    length = tokens.prompt + tokens.response * (config.rollout.n_samples_per_prompt if is_shared else 1)
    roles: dict[str, RoleMemory] = {}
    for name, pretrain in names.items():
        shape = shapes(pretrain)
        # A critic and a reward model have scores instead of logits.
        shape = shape.with_score_head() if name in ("critic", "reward") else shape
        trains = config.roles[name].is_trained
        shape = images.added_to(shape, length, trains=trains and trains_vision(config))
        num_ranks = len(layout.of(config.host_of(name)))
        role = trained_role(config, shape, config.deepspeed_of(name), num_ranks, hardware)
        if trains:
            check_states(config, role.settings)
        else:
            role = frozen_role(role, shape, role.settings, num_ranks)
        roles[name] = role
    hosts, teachers = {name: config.host_of(name) for name in names}, ["teacher"]
    for number, pretrain in enumerate(config.other_teachers, 2):
        shape = images.added_to(shapes(pretrain), length)
        roles[f"teacher {number}"] = replace(roles["teacher"], shape=shape)
        hosts[f"teacher {number}"] = config.host_of("teacher")
        teachers.append(f"teacher {number}")
    if len(teachers) > 1:
        # Assume that each one scores an equal share of the tokens.
        each = dict.fromkeys(teachers, tokens.forward["teacher"] / len(teachers))
        tokens = replace(tokens, forward={**tokens.forward, **each})
    together = bool(config.placement.colocate_all_models)
    return Workload(
        config=config,
        hardware=hardware,
        roles=roles,
        layout=layout,
        tokens=tokens,
        longest=-(-(config.prompts.max_len + _ENDS) // min(config.sequence_sizes)),
        hosts=hosts,
        engine=engine_of(config, shapes(config.model.pretrain), hardware, shared=together),
        judge=judge_of(config, shapes, hardware, shared=config.layout_settings(()).own_judge is None),
        models_sleep=bool(config.placement.deepspeed_enable_sleep),
        engines_sleep=bool(config.engine.vllm_enable_sleep),
        samples_ahead=config.asynchronous.staleness > 0,
        steps=_iterations(config, plan),
        images=images,
    )


def on_layout(work: Workload, settings: LayoutSettings, layout: Layout) -> Workload:
    """Return the workload of an online command on a layout, which `settings` describe."""
    assert isinstance(work.config, OnlineConfig)
    assert work.engine is not None
    roles = {name: replace(role, num_ranks=len(layout.of(work.host(name)))) for name, role in work.roles.items()}
    given = work.config.engine.vllm_gpu_memory_utilization
    share = memory_share(given, shared=bool(settings.together))
    judge = work.judge
    if judge is not None:
        judge = replace(judge, share=memory_share(given, shared=settings.own_judge is None))
    return replace(
        work,
        roles=roles,
        layout=layout,
        engine=replace(work.engine, share=share, size=settings.engine_size or 1),
        judge=judge,
        models_sleep=bool(settings.models_sleep),
        engines_sleep=bool(settings.engines_sleep),
    )


def _iterations(config: OnlineConfig, plan: PlanConfig) -> int | None:
    rollout = config.rollout
    found = None
    if plan.num_rows is not None:
        found = -(-plan.num_rows // rollout.rollout_batch_size) * rollout.num_episodes
    if rollout.max_iterations is None:
        return found
    return min(found or rollout.max_iterations, rollout.max_iterations)


def online_models(config: OnlineConfig, *, has_critic: bool) -> dict[str, str]:
    """Return the models of an online run by role, in the order of `ROLES`."""
    models = {name: _model_of(config, role, has_critic=has_critic) for name, role in config.roles.items()}
    return {name: model for name, model in models.items() if model is not None}


def _model_of(config: OnlineConfig, role: Role, *, has_critic: bool) -> str | None:
    """Return the model of a role, None if the run has none."""
    policy, given = config.model.pretrain, config.setting(role.pretrain) if role.pretrain else None
    if role.is_trained:
        return (given or policy) if has_critic or not role.pretrain else None
    if role.rank != FROZEN_POLICY:
        return config.reward.prm_pretrain or given
    # An adapter can be disabled instead of loading a second copy.
    is_reference = not role.pretrain and config.policy.init_kl_coef > 0 and not adapter_rank(config)
    return policy if is_reference else given


def _online_tokens(config: OnlineConfig, plan: PlanConfig, roles: Sequence[str], images: RowImages) -> Tokens:
    rollout = config.rollout
    requests = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    prompt, response = mean_lengths(config.prompts.max_len, rollout.max_new_tokens, plan, images)
    is_shared = config.batch.share_prompts and rollout.n_samples_per_prompt > 1
    prompts = rollout.rollout_batch_size if is_shared else requests
    tokens = prompts * prompt + requests * response
    epochs = config.batch.max_epochs
    forward = {name: tokens for name in roles if name not in config.hosted_roles}
    updates = -(-requests // config.batch.train_batch_size) * epochs
    is_cached = config.engine.enable_prefix_caching
    return Tokens(
        trained=tokens * epochs,
        updates=updates,
        forward=forward | ({name: tokens * epochs for name in roles if name in config.hosted_roles}),
        length=prompt + response,
        requests=requests,
        prompt=prompt,
        response=response,
        prefilled=(rollout.rollout_batch_size if is_cached else requests) * prompt,
    )
