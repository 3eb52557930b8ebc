"""An online run after all checks that need no process, before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch.utils.cpp_extension import CUDA_HOME

from rlhf_cli.algorithms.estimators.estimator import Estimator
from rlhf_cli.backends.cluster.placement import check_layout, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import may_have_gpus
from rlhf_cli.backends.rollout.backend_choice import rollout_backend
from rlhf_cli.backends.rollout.vllm_arguments import check_vllm_args
from rlhf_cli.backends.training.checkpoint import Checkpoint, CheckpointStore, check_same_run
from rlhf_cli.backends.training.deepspeed_config import check_compiler, check_deepspeed
from rlhf_cli.backends.weight_sync.transfer import check_sync_backend
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.base import default_settings
from rlhf_cli.config.plugins import contents_of_plugins
from rlhf_cli.data.prompts import Prompt, PromptData, load_prompts
from rlhf_cli.data.teachers import as_teachers_read, teachers_of_prompts
from rlhf_cli.data.tokenizing.tokenizer import check_token_ids
from rlhf_cli.errors import UsageError
from rlhf_cli.models.requirements import check_packed_length, check_positions
from rlhf_cli.models.reward_model import RewardModelPlan
from rlhf_cli.models.routers import check_router_loss
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.layouts import choose_layout
from rlhf_cli.planning.phases import batching_of
from rlhf_cli.planning.planner import shapes_of
from rlhf_cli.planning.workload import CPU_PLACES
from rlhf_cli.runs.adapter_rates import adapter_rate_notices
from rlhf_cli.runs.episodes import EpisodePlan, find_episodes
from rlhf_cli.runs.memory import online_workload, shortage_notice, with_batching
from rlhf_cli.runs.online.checks import (
    check_partial_rollout,
    check_settings,
    correction_notices,
    most_episodes,
)
from rlhf_cli.runs.online.evaluation import load_evaluation_prompts
from rlhf_cli.runs.online.group_files import check_state
from rlhf_cli.runs.online.identity import online_identity
from rlhf_cli.runs.online.models import (
    OnlineModels,
    check_adapters,
    check_pictures,
    check_ranks_together,
    check_replayed,
    check_stages,
    find_models,
    idle_settings,
    layout_notices,
    truncation_notice,
)
from rlhf_cli.runs.online.student import StudentData, load_student_data
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.runs.plugin_files import environment_contents, plugin_notice
from rlhf_cli.runs.reward_check import check_rewards
from rlhf_cli.runs.reward_file import reward_file_notice
from rlhf_cli.runs.run_directory import RunDirectory, run_directory
from rlhf_cli.runs.teachers import teachers_facts
from rlhf_cli.runs.trained_model import ModelPlan, reference_notice
from rlhf_cli.tracking.sinks import check_tracking
from rlhf_cli.trainers.online.curriculum import curriculum_keys
from rlhf_cli.trainers.online.prompt_source import planned_iterations
from rlhf_cli.trainers.online.state import OnlineSettings
from rlhf_cli.trainers.online.update_plan import StepCounts, count_steps

_PlanT = TypeVar("_PlanT", ModelPlan, ModelPlan | RewardModelPlan)
_UNKNOWN_MEMORY = "layers are recomputed, because the GPUs are on other nodes and their memory is unknown"


@dataclass(frozen=True)
class OnlineRun:
    """A checked online run."""

    config: OnlineConfig
    estimator: Estimator
    backend: str
    models: OnlineModels
    data: PromptData
    eval_data: PromptData | None
    paths: RunDirectory
    store: CheckpointStore
    resume: Checkpoint | None
    student: StudentData | None = None
    episodes: EpisodePlan | None = None
    identity: dict[str, object] = field(default_factory=dict)
    layout_reason: str = ""
    memory_reason: str = ""
    shortage: str = ""
    teachers: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokenizer(self) -> object:
        """The policy's tokenizer."""
        return self.models.policy.tokenizer

    @property
    def settings(self) -> OnlineSettings:
        return OnlineSettings.of(
            self.config, self.estimator, end_ids=self.data.end_ids, teacher_tokens=self.models.teacher_tokens
        )

    @property
    def total_iterations(self) -> int:
        """Number of iterations in the run."""
        return planned_iterations(len(self.data.prompts), self.settings)

    @property
    def total_steps(self) -> StepCounts:
        """Number of optimizer steps in the run, used by the learning-rate schedules."""
        rollout = self.config.rollout
        prompts = min(rollout.rollout_batch_size, len(self.data.prompts))
        samples = prompts * rollout.n_samples_per_prompt
        return count_steps(samples, self.config.batch, self.config.critic, iterations=self.total_iterations)


def check_run(config: OnlineConfig, estimator: Estimator) -> OnlineRun:
    """Run all checks that need no process. Raises UsageError if a check fails."""
    # Check settings before models, and models before data, in the order of their cost.
    check_tracking(config.tracking)
    check_settings(config, estimator)
    for role in config.trained_roles:
        _check_deepspeed(config, role, sleeps=bool(config.placement.deepspeed_enable_sleep))
    backend = rollout_backend(config.engine)
    check_sync_backend(config.engine.vllm_sync_backend, engine=backend)
    check_vllm_args(config.engine, backend=backend, on_cpu=not may_have_gpus(), min_p=config.rollout.min_p)
    check_partial_rollout(config, backend=backend)
    models = find_models(config, estimator)
    model = models.policy
    # On a CPU, vLLM is not the default engine of every model.
    replays = config.policy.rollout_routing_replay
    backend = rollout_backend(config.engine, model.architecture, returns_experts=replays)
    check_partial_rollout(config, backend=backend)
    check_adapters(config, models, backend=backend)
    check_pictures(config, models, backend=backend)
    check_router_loss(config.optim.aux_loss_coef, model.architecture)
    check_packed_length(model.architecture, config.prompts.max_len)
    check_replayed(config, model.architecture, backend=backend)
    if backend == "vllm":
        check_positions(model.architecture, config.prompts.max_len)
    # Open sizes are filled in by `placed_run` once the GPUs are known, so check them there.
    if not (config.layout_settings(models.by_role).is_open and may_have_gpus()):
        _check_places(config, models)
    episodes = find_episodes(config.episodes, config.prompts, config.template, model.found, model.tokenizer)
    data, eval_data, student, teachers = _load_data(config, models, episodes)
    all_data = [data] if eval_data is None else [data, eval_data]
    # The critic may have a smaller embedding than the policy.
    for trained in (model, models.critic or model):
        for read in all_data:
            largest, where = read.report.largest_token, read.report.largest_token_at
            check_token_ids(largest, where, model.tokenizer, trained.architecture, pretrain=trained.base.pretrain)
    paths = run_directory(config.checkpoint)
    store = CheckpointStore(paths.checkpoints, max_num=config.checkpoint.max_ckpt_num)
    resume = store.latest() if config.checkpoint.load_checkpoint else None
    run = OnlineRun(
        config, estimator, backend, models, data, eval_data, paths, store, resume, student, episodes, teachers=teachers
    )
    iterations = run.total_iterations
    identity = {
        **online_identity(config, models, data, estimator=estimator, iterations=iterations),
        **(student.identity if student else {}),
    }
    # Check the state before comparing identities, since an older format has other entries.
    if resume is not None:
        check_state(resume)
        check_same_run(resume, identity, default_settings(config))
    run = replace(run, identity=identity)
    if not run.total_steps.actor:
        raise UsageError(f"freezing_actor_steps leaves no step for the actor in {run.total_iterations} iterations")
    check_rewards(
        config.reward,
        *(read.prompts for read in all_data),
        is_episode=config.episodes.plays_episodes,
        judge=models.judge,
    )
    return run


def _with_teachers(config: OnlineConfig, models: OnlineModels, data: PromptData) -> tuple[PromptData, dict[str, str]]:
    """Return (prompts with their teachers, summary of the teachers)."""
    assigned = teachers_of_prompts(config, data.prompts)
    facts = teachers_facts(models.teacher_tokens, assigned)
    prompts = data.prompts if assigned is None else assigned.of_prompts(data.prompts)
    if models.teacher_tokens:
        if data.has_pictures:
            raise UsageError("--teacher_tokenizer own does not support models with images")
        read = [
            load_prompts(
                config.prompts,
                teacher.tokenizer,
                max_new_tokens=config.rollout.max_new_tokens,
                seed=config.batch.seed,
                template=config.template,
            ).prompts
            for teacher in models.teachers
        ]
        prompts = as_teachers_read(prompts, read)
        if dropped := len(data.prompts) - len(prompts):
            facts["Tokens"] += f"; {dropped:,} prompts dropped, too long there"
    return replace(data, prompts=prompts), facts


def _check_places(config: OnlineConfig, models: OnlineModels) -> None:
    """Raise UsageError if the number of ranks per role does not suit the settings."""
    check_stages(config, tuple(models.by_role))
    check_ranks_together(config, models)
    check_layout(config.layout_settings(models.by_role))


def placed_run(run: OnlineRun, node_gpus: Sequence[int], hardware: Hardware | None) -> OnlineRun:
    """Fill in sizes of roles and engines that are not set, according to the cluster's GPUs.

    Args:
        node_gpus: GPUs per node, largest first; empty on a cluster without GPUs.
        hardware: the GPUs, or the only node without GPUs; None if unknown.
    """
    config, models = run.config, run.models
    layout, reason = choose_layout(
        config.updated({"rollout_backend": run.backend}),
        hardware,
        shapes_of(config),
        has_critic=models.critic is not None,
        node_gpus=node_gpus,
        can_sleep=_can_compile(config),
    )
    config = config.with_layout(layout)
    _check_places(config, models)
    if run.resume is not None:
        layout_notices(run.resume, config, models)
    placed = replace(run, config=config, layout_reason=reason)
    if hardware is None and not node_gpus:
        return placed
    return _fitted(placed, hardware, node_gpus or [CPU_PLACES], given=run.config)


def _fitted(run: OnlineRun, hardware: Hardware | None, node_gpus: Sequence[int], *, given: OnlineConfig) -> OnlineRun:
    """Choose activation recomputation and micro-batch size to fit the memory.

    Args:
        hardware: GPUs or CPU; None for GPUs of unknown memory, for which layers are recomputed.
        given: the settings without a layout.
    """
    config, models = run.config, run.models
    if hardware is None:
        recomputes = config.model.gradient_checkpointing is not False
        return _with_recomputing(
            run, recomputes, _UNKNOWN_MEMORY if config.model.gradient_checkpointing is None else ""
        )
    layout = plan_layout(config.layout_settings(models.by_role), node_gpus=list(node_gpus))
    work = online_workload(config, layout, hardware=hardware, has_critic=models.critic is not None)
    batching = batching_of(work)
    run = replace(run, config=with_batching(config, batching), shortage=shortage_notice(given, work, batching))
    return _with_recomputing(run, batching.recomputes, batching.reason)


def _with_recomputing(run: OnlineRun, recomputes: bool, reason: str) -> OnlineRun:
    """Enable or disable recomputation in the models; a teacher and a reward model never recompute."""
    update = {"gradient_checkpointing": recomputes}

    def changed(model: _PlanT) -> _PlanT:
        if isinstance(model, RewardModelPlan) or model.source.gradient_checkpointing is False:
            return model
        return replace(model, source=model.source.model_copy(update=update), base=model.base.model_copy(update=update))

    trained = {role: changed(model) for role, model in run.models.trained.items()}
    frozen = {role: changed(model) for role, model in run.models.frozen.items()}
    models = replace(run.models, trained=trained, frozen=frozen)
    config = run.config.model_copy(update={"model": run.config.model.model_copy(update=update)})
    return replace(run, config=config, models=models, memory_reason=reason)


def _can_compile(config: OnlineConfig) -> bool:
    """Return whether this machine can compile the CPU Adam that ZeRO-3 needs to offload states."""
    try:
        if any(config.deepspeed_of(role).zero_stage == 3 for role in config.trained_roles):
            check_compiler(CUDA_HOME, torch_cuda=torch.version.cuda)
    except UsageError:
        return False
    return True


def _check_deepspeed(config: OnlineConfig, role: str, *, sleeps: bool) -> None:
    check_deepspeed(
        config.deepspeed_of(role), param_dtype=config.model.param_dtype, optimizer=config.optim.optim, sleeps=sleeps
    )


def _load_data(
    config: OnlineConfig, models: OnlineModels, episodes: EpisodePlan | None
) -> tuple[PromptData, PromptData | None, StudentData | None, dict[str, str]]:
    """Load the training prompts, evaluation prompts, student responses and the summary of teachers."""
    model = models.policy
    reader = picture_reader(config.pictures, model.base, model.found, model.tokenizer)
    data = load_prompts(
        config.prompts,
        model.tokenizer,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.batch.seed,
        template=config.template,
        reward=config.reward,
        reader=reader,
        environment=episodes.description if episodes else None,
    )
    _check_sources(config, data.prompts)
    eval_data = load_evaluation_prompts(config, model.tokenizer, reader, episodes)
    for read in (data, eval_data):
        if episodes is not None and read is not None:
            episodes.check_rows(read)
    if episodes is not None:
        episodes.check_sessions(most_episodes(config, num_prompts=len(data.prompts)))
    data, teachers = _with_teachers(config, models, data)
    student = None
    if isinstance(config, GKDConfig):
        student = load_student_data(config, models, num_prompts=len(data.prompts))
    return data, eval_data, student, teachers


def _check_sources(config: OnlineConfig, prompts: Sequence[Prompt]) -> None:
    """Raise UsageError if the mixture of sources is to follow the run, and there is only one source."""
    if config.rollout.prompt_sampling != "source_variance":
        return
    sources = sorted(set(curriculum_keys(prompts, "source_variance")))
    if len(sources) < 2:
        raise UsageError(
            f"--prompt_sampling source_variance needs prompts of several sources, but all are of {sources[0]}: pass "
            "several data sets, add a column data_source, or set --prompt_sampling variance"
        )


def continued_run(run: OnlineRun) -> OnlineRun:
    """Check the run again to resume it from the latest checkpoint, or else from the start."""
    checkpoint = run.config.checkpoint.model_copy(update={"load_checkpoint": True, "overwrite": False})
    return check_run(run.config.model_copy(update={"checkpoint": checkpoint}), run.estimator)


def notices(run: OnlineRun) -> list[str]:
    """Return notices about settings with no effect or an unexpected effect."""
    config = run.config
    idle = idle_settings(config, tuple(run.models.by_role))
    files = [*reward_file_notice(run.resume, config.reward), *plugin_notice(run.resume, code_of_others(config))]
    layouts = layout_notices(run.resume, config, run.models) if run.resume else []
    reference = reference_notice(run.models.policy) if config.policy.init_kl_coef > 0 else []
    return [
        *idle,
        *truncation_notice(config.rollout),
        *correction_notices(config),
        *adapter_rate_notices(config, run.models.rates_of_adapters),
        *reference,
        *files,
        *layouts,
        *filter(None, [run.shortage]),
    ]


def code_of_others(config: OnlineConfig) -> dict[str, str]:
    """Hash each file with user code except the reward file, keyed by setting."""
    return contents_of_plugins(config) | environment_contents(config.episodes)
