"""Implementation of all online commands: cluster, models, run directory, tracking, training and cleanup."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from rich.console import Console

from rlhf_cli.backends.cluster.default_layout import idle_gpus
from rlhf_cli.backends.cluster.placement import describe, plan_layout
from rlhf_cli.backends.cluster.ray_cluster import Reservation, ray_cluster
from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.backends.roles.groups import StudentRole
from rlhf_cli.backends.roles.start import Processes
from rlhf_cli.backends.rollout.backend_choice import described
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.environment import SELDOM, resume_collector
from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.models.attention.table import attention_note
from rlhf_cli.models.dtypes import DTYPES, dtype_note
from rlhf_cli.models.mixers.layers import mixers_note
from rlhf_cli.options import to_yaml
from rlhf_cli.planning.hardware import hardware_of_run, unmeasured_cpu
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.adapter_rates import adapter_rate_facts
from rlhf_cli.runs.busy_machine import crowd_notice, load_notice
from rlhf_cli.runs.conclusion import conclude
from rlhf_cli.runs.events import alarm_event
from rlhf_cli.runs.judge_model import asked_judge
from rlhf_cli.runs.memory import online_workload, sleep_memory_fact
from rlhf_cli.runs.memory_fixes import with_memory_fixes
from rlhf_cli.runs.online.checked_run import OnlineRun, check_run, code_of_others, continued_run, notices, placed_run
from rlhf_cli.runs.online.estimator import estimator_of
from rlhf_cli.runs.online.evaluation import best_facts, evaluation_task, forget_later_best, make_evaluator
from rlhf_cli.runs.online.group_files import load_state, save_groups
from rlhf_cli.runs.online.models import reward_model_fact, together
from rlhf_cli.runs.online.restarts import Restarts
from rlhf_cli.runs.online.start_roles import OnlineRoles
from rlhf_cli.runs.plan_proof import record_plan, sampled_settings
from rlhf_cli.runs.plugin_files import PLUGIN_FILES
from rlhf_cli.runs.reward_file import REWARD_FILE, reward_file_hash, reward_file_notice
from rlhf_cli.runs.run_directory import begin_logs, held_output, prepare_run_directory
from rlhf_cli.runs.run_lock import write_lock
from rlhf_cli.runs.stop_notice import stop_announced
from rlhf_cli.tracking.terminal.console import quiet_process
from rlhf_cli.tracking.tracker import SilentTracker, Tracker
from rlhf_cli.tracking.view.export import record_report
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.distilling import train_student
from rlhf_cli.trainers.online.evaluation import Evaluator
from rlhf_cli.trainers.online.loop import OnlineHooks, ScoredBatch, train_online
from rlhf_cli.trainers.online.prompt_source import RolloutSource, prompt_at
from rlhf_cli.trainers.online.state import LoopState, first_state

_STOP = "an iteration is done and saved"
"""Completes "The run ends as soon as ..." after a stop signal."""


def run_online(config: OnlineConfig) -> None:
    """Train from the latest checkpoint or from the start. Saves the models and the report."""
    # Hold the lock over all attempts, so that no other run takes the folder between them.
    with held_output(config.checkpoint):
        # One signal handler for all attempts: a stop request must survive a restart.
        first, stop = check_run(config, estimator_of(config)), StopSignal()
        begin_logs(first.paths, keep=first.resume is not None)

        restarts = Restarts(
            config.checkpoint.max_restarts,
            stop,
            has_checkpoint=lambda: bool(first.store.steps()),
            say=lambda message: print(f"rlhf {config.command}: {message}", file=sys.stderr, flush=True),
        )
        finished = None
        while finished is None:
            with restarts.caught():
                # Check again before a restart, because it resumes from the latest checkpoint.
                finished = _attempt(continued_run(first) if restarts.count else first, stop)
    if finished.interrupted:
        sys.exit(INTERRUPTED)


def _attempt(run: OnlineRun, stop: StopSignal) -> Finished:
    """Start everything, train, save and shut down."""
    config = run.config
    with ExitStack() as stack:
        terminal = stack.enter_context(quiet_process(run.paths.logs / "driver.log"))
        stack.enter_context(stop_announced(stop, partial(terminal.console.print, soft_wrap=True), _STOP))
        is_busy = load_notice()  # measured before Ray adds to the load
        run, where = reserve(run, stack)
        # The plan in an error needs the sizes that were chosen for this cluster.
        stack.enter_context(with_memory_fixes(run.config, where.cluster.node_gpus if where.cluster.has_gpus else ()))
        hints = [] if where.cluster.has_gpus else [*is_busy, *crowd_notice(where.layout, where.cluster.num_cpus)]
        for line in [*notices(run), *hints, f"Starting on {_placement(run, where)}; logs in {run.paths.logs}"]:
            terminal.console.print(line, markup=False, soft_wrap=True)
        roles = stack.enter_context(build(run, where))
        if run.episodes is not None:
            roles.rollout = stack.enter_context(run.episodes.played_by(roles.engines))
        scorer = stack.enter_context(scorer_of(run, roles, lambda text: tracker.message(text)))
        # The driver creates a million objects per iteration of 65,536 samples, and hardly any is garbage: with normal
        # thresholds, the collector takes a fifth of its time.
        resume_collector(SELDOM)
        # Only now: a failed start must not remove an earlier run.
        prepare_run_directory(config.checkpoint, to_yaml(config), keep=run.resume is not None)
        _lock(run)
        tracker = stack.enter_context(_tracker(run, terminal.console))
        tracker.start(_facts(run, where), on_alarm=alarm_event(config))
        if run.resume is not None:
            forget_later_best(run.paths, run.resume, tracker.message)
        with stop_announced(stop, tracker.message, _STOP):
            train, evaluator = prepared(run, roles, scorer, tracker, stop)
            finished = train()
        # An interrupted run has saved a checkpoint; its model is not final.
        if not finished.interrupted:
            roles.actor.save_model(run.paths.model)
            if config.optim.enable_ema:
                roles.actor.save_average(run.paths.ema)
        conclude(tracker, run.paths, finished, config, best_facts(evaluator, run.paths))
        record_plan(run.paths.root, sampled_settings(run.data.prompts, where.cluster))
    # Outside the block: the report reads files that the tracker closes at its end.
    record_report(run.paths.root)
    return finished


def _lock(run: OnlineRun) -> None:
    """Write run.lock."""
    evaluated = {} if run.eval_data is None else {"contents of the evaluation prompts": run.eval_data.fingerprint}
    code = {**code_of_others(run.config), "reward_func": reward_file_hash(run.config.reward)}
    step = run.resume.step if run.resume else 0
    write_lock(run.paths.root, run.identity | evaluated, code, step=step)


def scorer_of(run: OnlineRun, started: OnlineRoles, tell: Callable[[str], None]) -> Scorer:
    """Return the scorer of the run's responses, which reports failures to `tell`."""
    return Scorer(
        run.config.reward,
        judges=asked_judge(run.models.judge, started),
        tell=tell,
        decode=partial(text_of, run.tokenizer, skip_special_tokens=False),
        needs_environment=run.models.teacher is None and run.config.reward.asks_environment,
    )


def _tracker(run: OnlineRun, console: Console) -> Tracker:
    return Tracker(
        run.config.tracking,
        run.paths.root,
        command=run.config.command,
        total_steps=run.total_iterations,
        console=console,
        resume_step=run.resume.step if run.resume else None,
        unit="iteration",
        saved=run.resume.state["tracker"] if run.resume else None,
    )


def reserve(run: OnlineRun, stack: ExitStack) -> tuple[OnlineRun, Processes]:
    """Fill in the run's sizes for the cluster, and reserve resources."""
    cluster = stack.enter_context(ray_cluster())
    node_gpus = cluster.node_gpus if cluster.has_gpus else []
    hardware = hardware_of_run(node_gpus, cluster.gpu_kinds) if node_gpus else None
    if len(cluster.node_gpus) == 1 and not cluster.has_gpus:
        hardware = unmeasured_cpu()
    run = placed_run(run, node_gpus, hardware)
    config = run.config
    layout = plan_layout(config.layout_settings(run.models.by_role), node_gpus=cluster.node_gpus)
    reservation = Reservation(layout, cluster)
    # The stack releases the reservation before it leaves the cluster.
    stack.callback(reservation.release)
    return run, Processes(cluster, reservation, run.paths.logs)


def build(run: OnlineRun, where: Processes) -> OnlineRoles:
    """Start all roles and engines."""
    try:
        return OnlineRoles(
            run.config, where, run.backend, run.models, total_steps=run.total_steps, end_ids=run.data.end_ids
        )
    except ProcessDied as death:
        if run.resume is not None:
            # The run directory may contain checkpoints from an earlier run, so restarting from the last one would be
            # wrong.
            raise
        raise RunError(*death.args) from death


def _placement(run: OnlineRun, where: Processes) -> str:
    """Describe the placement of roles, and their sequence and tensor parallelism."""
    groups = together(run.config, tuple(run.models.by_role))
    idle = idle_gpus(where.layout, where.cluster.node_gpus) if where.cluster.has_gpus else ""
    found = [*describe(where.layout, unit=where.cluster.unit), run.layout_reason, idle, *groups]
    return "; ".join(filter(None, found))


def _facts(run: OnlineRun, where: Processes) -> dict[str, str]:
    """Return the facts for the start of the run."""
    config, models, adapter = run.config, run.models, run.models.policy.plan
    # Several teachers are listed with their numbers of prompts.
    frozen = dict(models.frozen_policies)
    if "Teachers" in run.teachers:
        frozen.pop("teacher")
    reward_file = reward_file_notice(run.resume, config.reward)
    return {
        "Model": config.model.pretrain + (f", adapter of rank {adapter.config.r}" if adapter else ""),
        "Prompts": run.data.report.summary,
        **({"Evaluation": run.eval_data.report.summary} if run.eval_data else {}),
        **({"Critic": models.critic.source.pretrain} if models.critic not in (None, models.policy) else {}),
        **reward_model_fact(models.reward),
        **({"Judge": models.judge.described} if models.judge else {}),
        **{config.roles[role].title.capitalize(): found.source.pretrain for role, found in frozen.items()},
        **run.teachers,
        **(run.student.facts if run.student else {}),
        **({"Reward file": reward_file[0]} if reward_file else {}),
        **({"Environment": run.episodes.description.about} if run.episodes else {}),
        "Engine": described(config.engine, run.backend),
        "Placement": _placement(run, where),
        **({"Memory": run.memory_reason} if run.memory_reason else {}),
        **_sleep_fact(run, where),
        **attention_note(
            models.policy.attention,
            models.policy.architecture,
            DTYPES[config.model.param_dtype],
            on_gpu=where.cluster.has_gpus,
        ),
        **mixers_note(models.policy.layers, on_gpu=where.cluster.has_gpus),
        **dtype_note(config.model, on_gpu=where.cluster.has_gpus),
        **adapter_rate_facts(config, models.rates_of_adapters),
        "Logs": str(run.paths.logs),
    }


def _sleep_fact(run: OnlineRun, where: Processes) -> dict[str, str]:
    work = online_workload(run.config, where.layout, has_critic=run.models.critic is not None)
    return sleep_memory_fact(work, has_gpus=where.cluster.has_gpus)


def prepared(
    run: OnlineRun,
    started: OnlineRoles,
    scorer: Scorer,
    tracker: Tracker | SilentTracker,
    stop: Callable[[], bool],
    *,
    updates: Callable[[ScoredBatch | None, LoopState], None] = lambda batch, state: None,
    saves: bool = True,
) -> tuple[Callable[[], Finished], Evaluator]:
    """Load the state of the run. Returns the function that trains from it, and the evaluator.

    Args:
        updates: called before each update.
        saves: whether checkpoints are written.
    """
    state = first_state(run.config.policy)
    if run.resume is not None:
        # Prompts are not checkpointed, so groups find them by their position.
        state = load_state(run.resume, lambda place: prompt_at(place, run.data.prompts, run.settings))
        started.load(run.resume.path, iteration=state.iteration)

    def decode(token_ids: Sequence[int]) -> str:
        return text_of(run.tokenizer, token_ids, skip_special_tokens=True)

    reward_file, plugin_files = reward_file_hash(run.config.reward), code_of_others(run.config)
    task = evaluation_task(run.config, run.eval_data, decode, total_iterations=run.total_iterations)
    evaluator = make_evaluator(task, started, scorer, tracker, paths=run.paths, resume=run.resume)

    def save_checkpoint(state: LoopState) -> None:
        if not saves:
            return
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

    actor = started.actor
    source = RolloutSource(started.rollout, scorer, run.settings, run.data.prompts, decode, tell=tracker.message)
    if isinstance(actor, StudentRole):
        assert run.student is not None, "a student learns from a mixture"
        train = partial(train_student, started.with_scorer(actor, scorer), run.student.mixture, source)
    else:
        train = partial(train_online, started.with_scorer(actor, scorer), source)
    run_loop = partial(
        train,
        state=state,
        total_iterations=run.total_iterations,
        save_steps=run.config.checkpoint.save_steps,
        hooks=OnlineHooks(tracker, save_checkpoint, stop, evaluator, evaluator.is_due, updates),
    )
    return run_loop, evaluator
