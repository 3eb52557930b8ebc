"""Models, placement and tokens of a step, from the settings of a command."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from rlhf_cli.backends.cluster.default_layout import LayoutNeeds, fill_layout, memory_share
from rlhf_cli.backends.cluster.placement import Island, Layout, Seat, plan_layout
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.commands.distill import DistillConfig
from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.commands.kto import KTOConfig
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.placement import LayoutSettings
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.config.preference import PAIR_LOSSES
from rlhf_cli.config.roles import FROZEN_POLICY, Role
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import adapter_folder
from rlhf_cli.planning.architectures import read_adapter
from rlhf_cli.planning.engines import EngineMemory
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.memory import FOUR_BIT_BYTES, WEIGHT_BYTES, RoleMemory
from rlhf_cli.planning.shapes import ModelShape

TrainingConfig = OfflineConfig | OnlineConfig
Shapes = Callable[[str], ModelShape]
"""Returns the shape of a model by its name or folder."""
MODEL, REFERENCE, TEACHER = "model", "reference", "teacher"
_CPU_PLACES = 1024
"""Number of processes that fit on a machine without GPUs."""
_ENDS = 16
"""Extra tokens that a role may read after the longest sequence: a separator, or one more state."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of one step (online: iteration), over all ranks.

    - `trained`, `updates`: tokens in forward and backward passes, and optimizer steps.
    - `forward`: tokens in forward passes without gradients, by role.
    - `length`: mean sequence length.
    - `requests`, `prompt`, `response`: sampled responses, mean tokens of a prompt and of a response; `prefilled` counts
      prompt tokens that the engines compute.
    """

    trained: float = 0
    updates: int = 1
    forward: Mapping[str, float] = field(default_factory=dict)
    length: float = 0
    requests: int = 0
    prompt: float = 0
    response: float = 0
    prefilled: float = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A command on hardware, with all sizes filled in.

    - `roles`: models by role; `trained` are those with an optimizer. `hosts`: the role whose ranks hold a model.
    - `longest`: tokens of the longest sequence in a rank's part.
    - `models_sleep`, `engines_sleep`: whether they leave their GPUs when idle.
    - `steps`: steps of the whole run, None if the number of rows is unknown.
    """

    config: CommandConfig
    hardware: Hardware
    roles: Mapping[str, RoleMemory]
    layout: Layout
    tokens: Tokens
    longest: int
    hosts: Mapping[str, str] = field(default_factory=dict)
    engine: EngineMemory | None = None
    models_sleep: bool = False
    engines_sleep: bool = False
    offloads_reference: bool = False
    reason: str = ""
    steps: int | None = None

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles with an optimizer."""
        return tuple(name for name, role in self.roles.items() if role.num_trained)

    def host(self, role: str) -> str:
        """Return the role whose ranks hold this model."""
        return self.hosts.get(role, role)


def workload_of(
    config: CommandConfig,
    plan: PlanConfig,
    hardware: Hardware,
    shapes: Shapes,
    *,
    has_critic: bool,
    layout: Layout | None = None,
) -> Workload:
    """Return the workload of a command.

    Args:
        config: the command's settings. With `layout`, sizes and sleep of an online run are filled in.
        layout: placement of an online run, by default planned for the hardware.

    Raises:
        UsageError: the settings need more GPUs than the hardware has, or the command cannot be planned.
    """
    if isinstance(config, OfflineConfig):
        return _offline(config, plan, hardware, shapes)
    if isinstance(config, OnlineConfig):
        return _online(config, plan, hardware, shapes, has_critic=has_critic, placed=layout)
    assert isinstance(config, InferenceConfig)
    return _inference(config, plan, hardware, shapes)


def _offline(config: OfflineConfig, plan: PlanConfig, hardware: Hardware, shapes: Shapes) -> Workload:
    num_ranks = config.launch.num_processes if hardware.num_nodes == 1 else hardware.total_gpus
    if num_ranks > hardware.total_gpus:
        raise UsageError(f"--num_processes {num_ranks} needs as many GPUs, but the plan has {hardware.total_gpus}")
    _check_states(config, config.deepspeed)
    roles = {MODEL: _trained_role(config, shapes(config.model.pretrain), config.deepspeed, num_ranks, hardware)}
    if config.command in ("rm", "prm"):
        roles[MODEL] = replace(roles[MODEL], shape=roles[MODEL].shape.with_score_head())
        roles[MODEL] = _with_trained(roles[MODEL], config)
    frozen = _offline_frozen(config)
    for name, (pretrain, settings) in frozen.items():
        roles[name] = _frozen(roles[MODEL], shapes(pretrain), settings, num_ranks)
    per_node = -(-num_ranks // hardware.num_nodes)
    islands = tuple(Island(node, per_node) for node in range(hardware.num_nodes))
    seats = [
        Seat(name, rank, rank // per_node, (rank % per_node,), len(roles) > 1)
        for name in roles
        for rank in range(num_ranks)
    ]
    rows = config.batch.train_batch_size
    sequences = 2 if config.command in ("dpo", "rm") else 1
    length = plan.row_tokens or config.data.max_len / 2
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
    )


def _trained_role(
    config: TrainingConfig, shape: ModelShape, settings: DeepSpeedConfig, num_ranks: int, hardware: Hardware
) -> RoleMemory:
    """Return the memory settings of a trained model."""
    in_4bit = config.adapter.load_in_4bit
    value_bytes = WEIGHT_BYTES[config.model.param_dtype]
    role = RoleMemory(
        shape=shape,
        num_ranks=num_ranks,
        settings=settings,
        optimizer=config.optim.optim,
        weight_bytes=FOUR_BIT_BYTES if in_4bit else value_bytes,
        value_bytes=value_bytes,
        offloads_activations=config.model.activation_offload,
        has_gpus=not hardware.is_cpu,
    )
    return _with_trained(role, config)


def _check_states(config: TrainingConfig, settings: DeepSpeedConfig) -> None:
    """Raise UsageError if DeepSpeed does not support the settings of a trained model."""
    sleeps = isinstance(config, OnlineConfig) and bool(config.placement.deepspeed_enable_sleep)
    # Packages of this machine do not matter for a plan.
    optimizer = "adamw" if config.optim.optim == "adamw_8bit" else config.optim.optim
    check_deepspeed(settings, param_dtype=config.model.param_dtype, optimizer=optimizer, sleeps=sleeps)


def _with_trained(role: RoleMemory, config: TrainingConfig) -> RoleMemory:
    adapter, rank = config.adapter, adapter_rank(config)
    if not rank:
        return replace(role, num_trained=role.shape.parameters)
    trained = role.shape.adapter_parameters(rank, adapter.target_modules, adapter.exclude_modules)
    return replace(role, num_trained=trained)


def adapter_rank(config: TrainingConfig) -> int:
    """Return the rank of the trained adapter, new or loaded; 0 without one."""
    folder = adapter_folder(config.model.pretrain)
    return int(config.adapter.lora_rank or (0 if folder is None else read_adapter(folder, "r")))


def _frozen(role: RoleMemory, shape: ModelShape, settings: DeepSpeedConfig, num_ranks: int) -> RoleMemory:
    """Return a frozen model of a run with the dtype of a trained one."""
    weights = role.value_bytes
    return replace(role, shape=shape, num_trained=0, settings=settings, num_ranks=num_ranks, weight_bytes=weights)


def _offline_frozen(config: OfflineConfig) -> dict[str, tuple[str, DeepSpeedConfig]]:
    """Return the frozen models of an offline command: name, model and DeepSpeed settings."""
    common = config.deepspeed.model_copy(update={"tensor_parallel_size": 1})
    if isinstance(config, DistillConfig):
        own, settings = config.distillation.teacher_zero_stage, config.distillation
        stage = common.zero_stage if own is None else own
        offload = settings.teacher_offload or (common.param_offload and stage == 3)
        update = {"zero_stage": stage, "param_offload": offload}
        return {TEACHER: (settings.teacher_pretrain, common.model_copy(update=update))}
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
    return dict.fromkeys(roles, tokens)


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


def _online(
    config: OnlineConfig,
    plan: PlanConfig,
    hardware: Hardware,
    shapes: Shapes,
    *,
    has_critic: bool,
    placed: Layout | None,
) -> Workload:
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
        role = _trained_role(config, shape, config.deepspeed_of(name), num_ranks, hardware)
        if config.roles[name].is_trained:
            _check_states(config, role.settings)
        else:
            role = _frozen(role, shape, role.settings, num_ranks)
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
        engine=_engine(config, shapes(config.model.pretrain), hardware, shared=together),
        models_sleep=bool(config.placement.deepspeed_enable_sleep),
        engines_sleep=bool(config.engine.vllm_enable_sleep),
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
    return config, plan_layout(config.layout_settings(with_ranks), node_gpus=node_gpus or [_CPU_PLACES]), reason


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
    prompt, response = _lengths(config.prompts.max_len, rollout.max_new_tokens, plan)
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


def _lengths(max_len: int, max_new_tokens: int, plan: PlanConfig) -> tuple[float, float]:
    """Return the mean tokens of prompts and responses, as given or half of their limits."""
    room = max(2, max_len - max_new_tokens)
    return plan.prompt_tokens or room / 2, plan.response_tokens or max_new_tokens / 2


def _engine(
    config: OnlineConfig | InferenceConfig, shape: ModelShape, hardware: Hardware, *, shared: bool
) -> EngineMemory:
    """Return the memory settings of a rollout engine."""
    engine = config.engine
    return EngineMemory(
        shape=shape,
        gpu_bytes=hardware.memory,
        share=memory_share(engine.vllm_gpu_memory_utilization, shared=shared),
        size=engine.vllm_tensor_parallel_size,
        value_bytes=WEIGHT_BYTES[config.model.param_dtype],
        max_len=config.prompts.max_len,
        num_sequences=_num_sequences(engine.engine_arguments),
        is_eager=bool(engine.enforce_eager),
        is_vllm=engine.rollout_backend in ("auto", "vllm"),
        has_gpus=not hardware.is_cpu,
    )


def _num_sequences(arguments: Mapping[str, object]) -> int | None:
    given = arguments.get("max_num_seqs")
    return given if isinstance(given, int) else None


def _inference(config: InferenceConfig, plan: PlanConfig, hardware: Hardware, shapes: Shapes) -> Workload:
    """Plan `generate` and `eval`: engines with fixed weights, and at most a reward model."""
    size, reward = config.engine.vllm_tensor_parallel_size, config.reward.reward_pretrain
    ranks = (config.reward_ranks.reward_num_gpus_per_node or 1) if reward else 0
    together = bool(config.placement.colocate_all_models) if reward else False
    num_engines = config.engine.vllm_num_engines or max(1, (hardware.total_gpus - ranks) // size)
    layout = LayoutSettings(
        shapes={"reward": (1, ranks)} if reward else {}, together=together, num_engines=num_engines, engine_size=size
    )
    names = getattr(config.model, "names", [config.model.pretrain])
    shape = max((shapes(name) for name in names), key=lambda one: one.parameters)
    sampling = config.sampling
    requests = sampling.rollout_batch_size * sampling.n_samples_per_prompt
    prompt, response = _lengths(config.prompts.max_len, sampling.max_new_tokens, plan)
    roles: dict[str, RoleMemory] = {}
    if reward:
        value_bytes = WEIGHT_BYTES[config.model.param_dtype]
        roles["reward"] = RoleMemory(
            shape=shapes(reward).with_score_head(),
            num_ranks=ranks,
            weight_bytes=value_bytes,
            value_bytes=value_bytes,
            has_gpus=not hardware.is_cpu,
        )
    return Workload(
        config=config,
        hardware=hardware,
        roles=roles,
        layout=plan_layout(layout, node_gpus=[_CPU_PLACES] if hardware.is_cpu else hardware.node_gpus),
        tokens=Tokens(
            forward=dict.fromkeys(roles, requests * (prompt + response)),
            length=prompt + response,
            requests=requests,
            prompt=prompt,
            response=response,
            prefilled=sampling.rollout_batch_size * prompt,
        ),
        longest=config.prompts.max_len,
        engine=_engine(config, shape, hardware, shared=together),
        steps=None if plan.num_rows is None else -(-plan.num_rows // sampling.rollout_batch_size),
    )
