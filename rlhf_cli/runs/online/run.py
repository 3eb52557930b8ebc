"""The common part of all online commands: checks, run directory, cluster, checkpoints, tracking, models."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from rich.console import Console

from rlhf_cli.algorithms.table import ALGORITHMS, Algorithm, algorithm_by_code
from rlhf_cli.backends.cluster.placement import check_layout, describe, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import Reservation, ray_cluster
from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.backends.roles.groups import StudentRole
from rlhf_cli.backends.rollout.engine_group import described, rollout_backend
from rlhf_cli.backends.rollout.vllm_arguments import check_vllm_args
from rlhf_cli.backends.training.checkpoint import Checkpoint, CheckpointStore, check_same_run
from rlhf_cli.backends.training.deepspeed_config import check_deepspeed
from rlhf_cli.backends.weight_sync.transfer import check_sync_backend
from rlhf_cli.config.base import default_settings
from rlhf_cli.config.commands.gkd import GKDConfig
from rlhf_cli.config.commands.online import OwnResponsesConfig
from rlhf_cli.config.plugins import contents_of_plugins
from rlhf_cli.data.prompts import PromptData, load_prompts
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.data.tokenizing.tokenizer import check_token_ids
from rlhf_cli.environment import resume_collector
from rlhf_cli.errors import ProcessDied, RunError, UsageError
from rlhf_cli.models.attention.table import attention_note
from rlhf_cli.models.dtypes import dtype_note
from rlhf_cli.models.requirements import check_positions
from rlhf_cli.models.routers import check_router_loss
from rlhf_cli.options import to_yaml
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.conclusion import conclude
from rlhf_cli.runs.episodes import EpisodePlan, find_episodes
from rlhf_cli.runs.online.checks import (
    check_batches,
    check_episodes,
    check_filtering,
    check_lag,
    check_partial_rollout,
    check_step_rewards,
    lag_notice,
    most_episodes,
)
from rlhf_cli.runs.online.evaluation import (
    best_facts,
    evaluation_task,
    forget_later_best,
    load_evaluation_prompts,
    make_evaluator,
)
from rlhf_cli.runs.online.group_files import check_state, load_state, save_groups
from rlhf_cli.runs.online.identity import online_identity
from rlhf_cli.runs.online.models import (
    OnlineModels,
    check_adapters,
    check_pictures,
    check_ranks_together,
    check_stages,
    find_models,
    idle_settings,
    layout_notices,
    reward_model_fact,
    role_names,
    together,
    truncation_notice,
)
from rlhf_cli.runs.online.restarts import with_restarts
from rlhf_cli.runs.online.sleep_memory import sleep_memory_fact
from rlhf_cli.runs.online.start_roles import OnlineCluster, OnlineRoles
from rlhf_cli.runs.online.student import StudentData, load_student_data
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.runs.plugin_files import PLUGIN_FILES, environment_contents, plugin_notice
from rlhf_cli.runs.reward_check import check_rewards
from rlhf_cli.runs.reward_file import REWARD_FILE, reward_file_hash, reward_file_notice
from rlhf_cli.runs.run_directory import (
    RunDirectory,
    begin_logs,
    held_output,
    prepare_run_directory,
    run_directory,
)
from rlhf_cli.runs.trained_model import TrainedModel
from rlhf_cli.tracking.report.page import write_report
from rlhf_cli.tracking.terminal.console import quiet_process
from rlhf_cli.tracking.tracker import Tracker, check_tracking
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.distilling import Distilling
from rlhf_cli.trainers.online.loop import OnlineHooks, train_online
from rlhf_cli.trainers.online.prompt_source import planned_iterations, prompt_at
from rlhf_cli.trainers.online.state import LoopState, OnlineSettings, first_state
from rlhf_cli.trainers.online.update_plan import StepCounts, count_steps


@dataclass(frozen=True)
class _OnlineRun:
    """The run as it is known before anything heavy starts."""

    config: OwnResponsesConfig
    command: str
    algorithm: Algorithm
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

    @property
    def tokenizer(self) -> object:
        """The policy's tokenizer."""
        return self.models.policy.tokenizer

    @property
    def settings(self) -> OnlineSettings:
        config = self.config
        return OnlineSettings(
            self.algorithm,
            config.rollout,
            config.reward_settings,
            config.policy_settings,
            config.batch,
            config.reference_settings,
            config.optim,
            config.dynamic_sampling,
            config.teacher_settings.weight,
            config.steps.prm_weight if config.steps else 1.0,
            config.lag,
            config.partial_rollout,
        )

    @property
    def total_iterations(self) -> int:
        """Iterations of the whole run."""
        return planned_iterations(len(self.data.prompts), self.settings)

    @property
    def total_steps(self) -> StepCounts:
        """Optimizer steps of the whole run, for the learning rates' courses."""
        rollout = self.config.rollout
        prompts = min(rollout.rollout_batch_size, len(self.data.prompts))
        samples = prompts * rollout.n_samples_per_prompt
        return count_steps(samples, self.config.batch, iterations=self.total_iterations)


def run_online(config: OwnResponsesConfig, command: str, *, algorithm: str) -> None:
    """Train from the newest checkpoint, or from the start, to the end; save the models and the report.

    Args:
        algorithm: the row of the table of algorithms.
    """
    with held_output(config.checkpoint):
        row, code = ALGORITHMS[algorithm], config.policy_settings.advantage_estimator
        row = row if code is None else algorithm_by_code(code, row)
        first, stop = _check(config, command, row), StopSignal()
        begin_logs(first.paths, keep=first.resume is not None)

        def attempt(continues: bool) -> Finished:
            return _attempt(_continued(first) if continues else first, stop)

        finished = with_restarts(
            attempt,
            max_restarts=config.checkpoint.max_restarts,
            should_stop=stop,
            has_checkpoint=lambda: bool(first.store.steps()),
            say=lambda message: print(f"rlhf {command}: {message}", file=sys.stderr, flush=True),
        )
    if finished.interrupted:
        sys.exit(INTERRUPTED)


def _continued(run: _OnlineRun) -> _OnlineRun:
    """Return the same run from its newest checkpoint on, or from the start if there is none yet."""
    checkpoint = run.config.checkpoint.model_copy(update={"load_checkpoint": True, "overwrite": False})
    return _check(run.config.model_copy(update={"checkpoint": checkpoint}), run.command, run.algorithm)


def _attempt(run: _OnlineRun, stop: StopSignal) -> Finished:
    """Start everything, train, save and end everything."""
    config = run.config
    with ExitStack() as stack:
        terminal = stack.enter_context(quiet_process(run.paths.logs / "driver.log"))
        where = _reserve(run, stack)
        for line in [*_notices(run), f"Starting on {_placement(run, where)}; logs in {run.paths.logs}"]:
            terminal.console.print(line, markup=False, soft_wrap=True)
        roles = stack.enter_context(_build(run, where))
        if run.episodes is not None:
            roles.rollout = stack.enter_context(run.episodes.played_by(roles.engines))
        scorer = stack.enter_context(
            Scorer(
                config.reward,
                tell=lambda text: tracker.message(text),
                decode=partial(text_of, run.tokenizer, skip_special_tokens=False),
            )
        )
        resume_collector()
        prepare_run_directory(config.checkpoint, to_yaml(config), keep=run.resume is not None)
        tracker = stack.enter_context(_tracker(run, terminal.console))
        tracker.start(_facts(run, where))
        if run.resume is not None:
            forget_later_best(run.paths, run.resume, tracker.message)
        finished, best = _train(run, roles, scorer, tracker, stop)
        if not finished.interrupted:
            roles.actor.trained.save_model(run.paths.model)
            if config.optim.enable_ema:
                roles.actor.trained.save_average(run.paths.ema)
        conclude(tracker, run.paths, finished, best)
    write_report(run.paths.root)
    return finished


def _check(config: OwnResponsesConfig, command: str, algorithm: Algorithm) -> _OnlineRun:
    """Return the run, after all checks that need no process. Raise UsageError if a check fails."""
    _check_settings(config, algorithm)
    backend = rollout_backend(config.rollout)
    check_sync_backend(config.rollout.vllm_sync_backend, engine=backend)
    check_vllm_args(config.rollout, backend=backend)
    check_partial_rollout(config, backend=backend)
    models = find_models(config, algorithm)
    model = models.policy
    check_adapters(config, models, backend=backend)
    check_pictures(config, models, backend=backend)
    check_router_loss(config.optim.aux_loss_coef, model.architecture)
    if backend == "vllm":
        check_positions(model.architecture, config.prompts.max_len)
    roles = role_names(config, models)
    check_stages(config, roles)
    check_ranks_together(config, models)
    check_layout(config.placement, config.rollout, roles=roles)
    episodes = find_episodes(config.episode_settings, config.prompts, model.found, model.tokenizer)
    data, eval_data, student = _load_data(config, model, episodes)
    all_data = [data] if eval_data is None else [data, eval_data]
    for trained in (model, models.critic or model):
        for read in all_data:
            check_token_ids(read.report, model.tokenizer, trained.architecture, pretrain=trained.base.pretrain)
    paths = run_directory(config.checkpoint)
    store = CheckpointStore(paths.checkpoints, max_num=config.checkpoint.max_ckpt_num)
    resume = store.latest() if config.checkpoint.load_checkpoint else None
    run = _OnlineRun(
        config, command, algorithm, backend, models, data, eval_data, paths, store, resume, student, episodes
    )
    iterations = run.total_iterations
    identity = {
        **online_identity(config, models, data, command=command, algorithm=algorithm, iterations=iterations),
        **(student.identity if student else {}),
    }
    if resume is not None:
        check_state(resume)
        check_same_run(resume, identity, default_settings(config))
        layout_notices(resume, config, models)
    run = replace(run, identity=identity)
    if not run.total_steps.actor:
        raise UsageError(f"freezing_actor_steps leaves no step for the actor in {run.total_iterations} iterations")
    check_rewards(config.reward, *(read.prompts for read in all_data))
    return run


def _check_settings(config: OwnResponsesConfig, algorithm: Algorithm) -> None:
    """Raise UsageError if settings do not go together, as far as no model is needed to see it."""
    check_tracking(config.tracking)
    check_batches(config, algorithm)
    check_filtering(config)
    check_step_rewards(config, algorithm)
    check_episodes(config)
    check_lag(config)
    if config.reference_settings.ref_sync_steps and not config.policy_settings.init_kl_coef:
        raise UsageError("--ref_sync_steps: without --init_kl_coef there is no reference that could move")
    for role in ("actor", "critic"):
        check_deepspeed(
            config.deepspeed.of(role),
            param_dtype=config.model.param_dtype,
            optimizer=config.optim.optim,
            sleeps=config.placement.deepspeed_enable_sleep,
        )


def _load_data(
    config: OwnResponsesConfig, model: TrainedModel, episodes: EpisodePlan | None
) -> tuple[PromptData, PromptData | None, StudentData | None]:
    """Return the prompts to train on, the held-out ones if there are any, and the responses of a student."""
    reader = picture_reader(config.pictures, model.base, model.found, model.tokenizer)
    data = load_prompts(
        config.prompts,
        model.tokenizer,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.batch.seed,
        reward=config.reward,
        reader=reader,
        environment=episodes.description if episodes else None,
    )
    eval_data = load_evaluation_prompts(config, model.tokenizer, reader, episodes)
    for read in (data, eval_data):
        if episodes is not None and read is not None:
            episodes.check_rows(read)
    if episodes is not None:
        episodes.check_sessions(most_episodes(config, num_prompts=len(data.prompts)))
    student = None
    if isinstance(config, GKDConfig):
        student = load_student_data(config, model, reader, num_prompts=len(data.prompts))
    return data, eval_data, student


def _tracker(run: _OnlineRun, console: Console) -> Tracker:
    return Tracker(
        run.config.tracking,
        run.paths.root,
        command=run.command,
        total_steps=run.total_iterations,
        console=console,
        resume_step=run.resume.step if run.resume else None,
        unit="iteration",
        saved=run.resume.state["tracker"] if run.resume else None,
    )


def _reserve(run: _OnlineRun, stack: ExitStack) -> OnlineCluster:
    config = run.config
    cluster = stack.enter_context(ray_cluster())
    layout = plan_layout(
        config.placement, config.rollout, roles=role_names(config, run.models), node_gpus=cluster.node_gpus
    )
    reservation = Reservation(layout, cluster)
    stack.callback(reservation.release)
    return OnlineCluster(cluster, reservation, run.paths.logs, run.backend)


def _build(run: _OnlineRun, where: OnlineCluster) -> OnlineRoles:
    try:
        return OnlineRoles(run.config, where, run.models, total_steps=run.total_steps)
    except ProcessDied as death:
        if run.resume is not None:
            raise
        raise RunError(death.message) from death  # a checkpoint to go on from could only be that of an earlier run


def _notices(run: _OnlineRun) -> list[str]:
    """Return lines about settings that mean nothing in this run, or something else than one might expect."""
    config = run.config
    idle = idle_settings(config, role_names(config, run.models))
    files = [*reward_file_notice(run.resume, config.reward), *plugin_notice(run.resume, _code_of_others(config))]
    layouts = layout_notices(run.resume, config, run.models) if run.resume else []
    return [*idle, *truncation_notice(config.rollout), *lag_notice(config), *files, *layouts]


def _code_of_others(config: OwnResponsesConfig) -> dict[str, str]:
    """Return a hash of each file with others' code but the reward's, by the setting that names it."""
    return contents_of_plugins(config) | environment_contents(config.episode_settings)


def _placement(run: _OnlineRun, where: OnlineCluster) -> str:
    """Return the places of the roles, and which roles have several ranks a sequence or a layer, in words."""
    groups = together(run.config, role_names(run.config, run.models))
    return "; ".join([*describe(where.layout, unit=where.cluster.unit), *groups])


def _facts(run: _OnlineRun, where: OnlineCluster) -> dict[str, str]:
    """Return the facts about the run for its start."""
    config, models, adapter = run.config, run.models, run.models.policy.plan
    reward_file = reward_file_notice(run.resume, config.reward)
    return {
        "Model": config.model.pretrain + (f", adapter of rank {adapter.config.r}" if adapter else ""),
        "Prompts": run.data.report.summary,
        **({"Evaluation": run.eval_data.report.summary} if run.eval_data else {}),
        **({"Critic": models.critic.source.pretrain} if models.critic not in (None, models.policy) else {}),
        **reward_model_fact(models.reward),
        **({"Teacher": models.teacher.source.pretrain} if models.teacher else {}),
        **(run.student.facts if run.student else {}),
        **({"Reward file": reward_file[0]} if reward_file else {}),
        **({"Environment": run.episodes.description.about} if run.episodes else {}),
        "Engine": described(config.rollout, run.backend),
        "Placement": _placement(run, where),
        **sleep_memory_fact(config, models, where.layout, has_gpus=where.cluster.has_gpus),
        **attention_note(models.policy.attention, models.policy.architecture, on_gpu=where.cluster.has_gpus),
        **({} if where.cluster.has_gpus else dtype_note(config.model)),
        "Logs": str(run.paths.logs),
    }


def _training(run: _OnlineRun, started: OnlineRoles, scorer: Scorer) -> Callable[..., Finished]:
    """Return the function that trains the actor by its kind, on these roles and settings."""
    actor = started.actor
    if isinstance(actor, StudentRole):
        assert run.student is not None, "a student learns from a mixture"
        return Distilling(started.with_scorer(actor, scorer), run.settings, run.student.mixture)
    return partial(train_online, started.with_scorer(actor, scorer), run.settings)


def _train(
    run: _OnlineRun, started: OnlineRoles, scorer: Scorer, tracker: Tracker, stop: StopSignal
) -> tuple[Finished, dict[str, str]]:
    """Train, and return the way it ended and the facts about the best model."""
    state = first_state(run.config.policy_settings)
    if run.resume is not None:
        state = load_state(run.resume, lambda place: prompt_at(place, run.data.prompts, run.settings))
        started.load(run.resume.path, iteration=state.iteration)

    def decode(token_ids: Sequence[int]) -> str:
        return text_of(run.tokenizer, token_ids, skip_special_tokens=True)

    reward_file, plugin_files = reward_file_hash(run.config.reward), _code_of_others(run.config)
    task = evaluation_task(run.config, run.eval_data, decode, total_iterations=run.total_iterations)
    evaluator = make_evaluator(task, started, scorer, tracker, paths=run.paths, resume=run.resume)

    def save_checkpoint(state: LoopState) -> None:
        saved = {
            "identity": run.identity,
            REWARD_FILE: reward_file,
            PLUGIN_FILES: plugin_files,
            "loop": state.plain(),
            "evaluation": evaluator.state.plain(),
            "tracker": tracker.state(),
        }
        with run.store.writing(state.iteration, saved, needed_bytes=started.checkpoint_bytes()) as folder:
            started.save(folder)
            save_groups(folder, state)

    finished = _training(run, started, scorer)(
        prompts=run.data.prompts,
        decode=decode,
        state=state,
        total_iterations=run.total_iterations,
        save_steps=run.config.checkpoint.save_steps,
        hooks=OnlineHooks(tracker, save_checkpoint, stop, evaluator, evaluator.is_due),
    )
    return finished, best_facts(evaluator, run.paths)
