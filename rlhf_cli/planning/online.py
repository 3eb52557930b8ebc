"""Workload of an online training command: its roles, their placement, and the tokens of an iteration."""

from collections.abc import Sequence
from math import lcm

from rlhf_cli.backends.cluster.default_layout import LayoutNeeds, fill_layout
from rlhf_cli.backends.cluster.placement import Layout, plan_layout
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.config.roles import FROZEN_POLICY, Role
from rlhf_cli.errors import UsageError
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.memory import RoleMemory
from rlhf_cli.planning.workload import (
    CPU_PLACES,
    Shapes,
    Tokens,
    Workload,
    adapter_rank,
    check_states,
    engine_of,
    frozen_role,
    mean_lengths,
    trained_role,
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
    placed: Layout | None,
) -> Workload:
    """Return the workload of an online command. `placed`: its layout, by default planned for the hardware."""
    names = _online_models(config, has_critic=has_critic)
    reason = ""
    if placed is None:
        config, placed, reason = _placed(config, list(names), hardware)
    roles: dict[str, RoleMemory] = {}
    for name, pretrain in names.items():
        shape = shapes(pretrain)
        # A critic and a reward model have scores instead of logits.
        shape = shape.with_score_head() if name in ("critic", "reward") else shape
        num_ranks = len(placed.of(config.host_of(name)))
        role = trained_role(config, shape, config.deepspeed_of(name), num_ranks, hardware)
        if config.roles[name].is_trained:
            check_states(config, role.settings)
        else:
            role = frozen_role(role, shape, role.settings, num_ranks)
        roles[name] = role
    tokens, together = _online_tokens(config, plan, list(names)), bool(config.placement.colocate_all_models)
    return Workload(
        config=config,
        hardware=hardware,
        roles=roles,
        layout=placed,
        tokens=tokens,
        longest=-(-(config.prompts.max_len + _ENDS) // min(config.sequence_sizes)),
        hosts={name: config.host_of(name) for name in names},
        engine=engine_of(config, shapes(config.model.pretrain), hardware, shared=together),
        models_sleep=bool(config.placement.deepspeed_enable_sleep),
        engines_sleep=bool(config.engine.vllm_enable_sleep),
        samples_ahead=config.asynchronous.staleness > 0,
        reason=reason,
        steps=_iterations(config, plan),
    )


def _placed(config: OnlineConfig, names: Sequence[str], hardware: Hardware) -> tuple[OnlineConfig, Layout, str]:
    """Place the roles of an online run like the run itself. Returns settings, layout and reason."""
    with_ranks = [name for name in names if not config.roles[name].host]
    node_gpus = [] if hardware.is_cpu else hardware.node_gpus
    settings = config.layout_settings(with_ranks)
    filled, reason = fill_layout(settings, node_gpus=node_gpus, needs=layout_needs(config, names))
    config = config.with_layout(filled)
    return config, plan_layout(config.layout_settings(with_ranks), node_gpus=node_gpus or [CPU_PLACES]), reason


def _iterations(config: OnlineConfig, plan: PlanConfig) -> int | None:
    rollout = config.rollout
    found = None
    if plan.num_rows is not None:
        found = -(-plan.num_rows // rollout.rollout_batch_size) * rollout.num_episodes
    if rollout.max_iterations is None:
        return found
    return min(found or rollout.max_iterations, rollout.max_iterations)


def _online_models(config: OnlineConfig, *, has_critic: bool) -> dict[str, str]:
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


def _online_tokens(config: OnlineConfig, plan: PlanConfig, roles: Sequence[str]) -> Tokens:
    rollout = config.rollout
    requests = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    prompt, response = mean_lengths(config.prompts.max_len, rollout.max_new_tokens, plan)
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
