"""Implementation of all offline commands: run directory, engine, checkpoints, tracking and model."""

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from rlhf_cli.backends.process.launch import stop_with_launcher
from rlhf_cli.backends.process.signals import ECHO_SECONDS, INTERRUPTED, StopSignal
from rlhf_cli.backends.roles.saved_models import describe_model, save_whole_model
from rlhf_cli.backends.training import distributed, distributed_env
from rlhf_cli.backends.training.checkpoint import Checkpoint, CheckpointStore, check_same_run
from rlhf_cli.backends.training.checkpoint_layout import continuation_notice
from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.backends.training.partitioned_loading import partitioned_loading
from rlhf_cli.backends.training.random_states import seed_everything
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.config.base import default_settings
from rlhf_cli.config.plugins import contents_of_plugins
from rlhf_cli.data.sampling import StepBatches
from rlhf_cli.data.templates.rendering import Renderer
from rlhf_cli.environment import resume_collector
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.adapters import load_with_adapter
from rlhf_cli.models.attention.table import attention_note
from rlhf_cli.models.cost import quadratic_cost
from rlhf_cli.models.dtypes import DTYPES, dtype_note
from rlhf_cli.models.loading import parameter_counts
from rlhf_cli.models.mixers.layers import mixers_note
from rlhf_cli.models.saving import end_at
from rlhf_cli.models.vision.freezing import frozen_parts_identity
from rlhf_cli.options import to_yaml
from rlhf_cli.planning.offline import sequences_per_row
from rlhf_cli.runs.adapter_rates import adapter_rate_facts, adapter_rate_notices
from rlhf_cli.runs.busy_machine import load_notice
from rlhf_cli.runs.conclusion import conclude
from rlhf_cli.runs.events import alarm_event
from rlhf_cli.runs.memory import hardware_of_ranks, offline_batching, with_batching
from rlhf_cli.runs.offline.task import Items, LoadedItems, OfflineTask, ReferenceHooks
from rlhf_cli.runs.plan_proof import gpu_settings, record_plan
from rlhf_cli.runs.plugin_files import PLUGIN_FILES, plugin_notice
from rlhf_cli.runs.run_directory import (
    RunDirectory,
    begin_log,
    held_output,
    prepare_run_directory,
    run_directory,
)
from rlhf_cli.runs.run_identity import (
    NOT_OF_THE_STEPS,
    adapter_identity,
    model_identity,
    supported_identity,
    tokenizer_identity,
)
from rlhf_cli.runs.run_lock import write_lock
from rlhf_cli.runs.shared_sequences import sharing, splitting, tokens_of_sequence
from rlhf_cli.runs.stop_notice import stop_announced
from rlhf_cli.tracking.terminal.console import quiet_process
from rlhf_cli.tracking.tracker import SilentTracker, Tracker
from rlhf_cli.tracking.view.export import record_report
from rlhf_cli.trainers.offline.loop import Finished, OfflineHooks, Schedule, Share, StepTracker, train

_STOP = "a step is done and saved"
"""Completes "The run ends as soon as ..." after a stop signal."""


def run_offline(config: OfflineConfig, task: OfflineTask) -> None:
    """Train from the latest checkpoint or from the start. Saves the model and the report."""
    # Before the lock: these errors need no output folder.
    check_items(config, task.items)
    rank, _ = distributed_env.rank_and_world_size()
    # Only rank 0 holds the lock, since file locks exclude other processes of the same run too.
    with held_output(config.checkpoint) if rank == 0 else nullcontext():
        finished = _train(config, task)
    if finished.interrupted:
        sys.exit(INTERRUPTED)


def _train(config: OfflineConfig, task: OfflineTask) -> Finished:
    rank, num_ranks = distributed_env.rank_and_world_size()
    given, paths = config, run_directory(config.checkpoint)
    store = CheckpointStore(paths.checkpoints, max_num=config.checkpoint.max_ckpt_num)
    resume = store.latest() if config.checkpoint.load_checkpoint else None
    continues = resume is not None
    is_rank = distributed_env.is_under_launcher()
    # Launchers forward the signal to ranks that have received it already.
    stop = StopSignal(echo_seconds=ECHO_SECONDS if is_rank else 0.0)
    if is_rank:
        stop_with_launcher()
    with (
        quiet_process(begin_log(paths, rank, keep=continues)) as terminal,
        stop_announced(stop, partial(terminal.console.print, soft_wrap=True), _STOP) if rank == 0 else nullcontext(),
    ):
        if rank == 0:
            for line in distributed.compile_notice():
                terminal.console.print(line, soft_wrap=True)
        # The collective below needs the group, and a check that fails on rank 0 must end all ranks.
        distributed.join_process_group()
        try:
            identity, notices = distributed.by_first_rank(
                lambda: (checked_identity(config, task, resume), _checked_layout(config, resume, num_ranks=num_ranks))
            )
        except UsageError:
            stop.restore()  # lets the launcher stop other ranks before they repeat the error
            distributed.leave_process_group()
            raise
        ready = make_ready(config, task, resume)
        config, task = ready.config, ready.task
        if rank == 0:  # only now: a failed start must not remove an earlier run
            _begin(given, ready.items, identity, num_ranks=num_ranks, resume=resume)
        # The collector was paused during imports and loading, when it only costs time.
        resume_collector()
        files = contents_of_plugins(config)
        adapter = adapter_rate_notices(config, _adapted(task))
        notices += [*adapter, *task.notices, *plugin_notice(resume, files), *_busy(num_ranks)]
        run = _OfflineRun(ready, paths, store, identity, files)
        with run.tracker(terminal.console, resume, notices) if rank == 0 else SilentTracker() as tracker:
            finished = run.train(tracker, stop, start_step=resume.step if resume else 0)
            # An interrupted run has saved a checkpoint; its model is not final.
            if not finished.interrupted:
                for name, value in task.describe(finished.evaluated).items():
                    setattr(ready.hf_model.config, name, value)
                save_whole_model(ready.engine, ready.hf_model, task.model.tokenizer, paths.model)
            conclude(tracker, paths, finished, given)
        if rank == 0:
            _report(given, ready.items.data, paths.root, num_ranks=num_ranks)
        distributed.leave_process_group()
    return finished


def _begin(
    config: OfflineConfig,
    items: Items[LoadedItems],
    identity: dict[str, object],
    *,
    num_ranks: int,
    resume: Checkpoint | None,
) -> None:
    """Prepare the run directory, and record what determines the results."""
    paths = prepare_run_directory(config.checkpoint, to_yaml(config), keep=resume is not None, num_ranks=num_ranks)
    if items.eval_data is not None:
        identity = identity | {"contents of the evaluation rows": items.eval_data.data.fingerprint()}
    write_lock(paths.root, identity, contents_of_plugins(config), step=resume.step if resume else 0)


def _report(config: OfflineConfig, data: LoadedItems, root: Path, *, num_ranks: int) -> None:
    """Compare the run with its plan, and write the report."""
    length = float(data.lengths.mean()) / sequences_per_row(config)
    found: dict[str, object] = {"row_tokens": max(1, round(length)), "num_processes": num_ranks}
    if distributed.device().type == "cuda":
        per_node = distributed_env.ranks_per_node()
        found |= gpu_settings([per_node] * (num_ranks // per_node))
    record_plan(root, found)
    record_report(root)


def _adapted(task: OfflineTask) -> tuple[str, ...]:
    """Return the setting of the learning rate if it trains an adapter."""
    return ("learning_rate",) if task.model.plan else ()


def _busy(num_ranks: int) -> list[str]:
    """Return a notice if other programs keep the cores busy. Skipped with multiple ranks, which look like other
    programs.
    """
    return load_notice() if distributed.device().type == "cpu" and num_ranks == 1 else []


@dataclass(frozen=True)
class Ready:
    """Model, items and reference on one rank, ready for the next optimizer step.

    - `config`, `task`: with the micro-batch size and activation recomputation that fit in GPU memory.
    - `memory`: the reason for them, by title.
    """

    config: OfflineConfig
    task: OfflineTask
    items: Items[LoadedItems]
    reference: ReferenceHooks
    share: Share
    hf_model: PreTrainedModel
    engine: DeepSpeedEngine
    memory: dict[str, str]

    def hooks(
        self, tracker: StepTracker, save_checkpoint: Callable[[int], None], should_stop: Callable[[], bool]
    ) -> OfflineHooks:
        """Return the callbacks of the loop."""
        reference, finish_metrics = self.reference, self.task.finish_metrics
        return OfflineHooks(
            tracker, save_checkpoint, should_stop, reference.prepare, reference.after_step, finish_metrics
        )


def make_ready(config: OfflineConfig, task: OfflineTask, resume: Checkpoint | None) -> Ready:
    """Load the model on all ranks of the process group, and restore a checkpoint."""
    config, task, memory = _fitted(config, task, num_ranks=distributed_env.rank_and_world_size()[1])
    # Seed before building: new adapters and heads draw their weights.
    seed_everything(config.batch.seed)
    share = _share(config, task)
    # Before the model: a reference for precomputed log-probs is freed again.
    items, reference = task.begin(task.items, share)
    hf_model, engine = _build(config, task)
    if resume is not None:
        engine.load(resume.path / "model")
        if reference.load is not None:
            reference.load(resume.path / "model")
    return Ready(config, task, items, reference, share, hf_model, engine, memory)


def _fitted(
    config: OfflineConfig, task: OfflineTask, *, num_ranks: int
) -> tuple[OfflineConfig, OfflineTask, dict[str, str]]:
    """Fit activation recomputation and micro-batch size to memory. All ranks use rank 0's values."""
    if distributed.device().type == "cpu" and distributed_env.ranks_per_node() < num_ranks:
        # Plans for a CPU have one machine.
        return config, task, {}
    hardware = distributed.by_first_rank(partial(hardware_of_ranks, num_ranks))
    parts = [part for part in (task.items.data, task.items.eval_data) if part is not None]
    # The longest item of both datasets must fit, since evaluation uses the same limit.
    longest = max(int(part.lengths.max()) for part in parts)
    batching = offline_batching(config, hardware, num_ranks=num_ranks, longest=longest)
    base = task.model.base.model_copy(update={"gradient_checkpointing": batching.recomputes})
    task = replace(task, model=replace(task.model, base=base))
    return with_batching(config, batching), task, {"Memory": batching.reason} if batching.reason else {}


def _share(config: OfflineConfig, task: OfflineTask) -> Share:
    """Return this rank's share of each step. Ranks that process packs together have the same share."""
    (rank, num_ranks), size = distributed_env.rank_and_world_size(), config.deepspeed.ranks_per_pack
    # Quadratic attention costs depend on the model, and balance the work of ranks.
    cost = quadratic_cost(task.model.architecture)
    shared = config.deepspeed.sequence_parallel_size
    return Share(rank // size, num_ranks // size, config.batch, cost, ranks_per_sequence=shared)


def check_items(config: OfflineConfig, items: Items) -> None:
    """Raise UsageError for items larger than a micro-batch, and for evaluation settings without evaluation data."""
    given = config.batch.changed("eval_steps", "stop_eval_loss")
    if items.eval_data is None and given:
        raise UsageError(f"{given} requires --eval_dataset")
    budget = tokens_of_sequence(config.batch, config.deepspeed)
    for what, part in (("training", items.data), ("evaluation", items.eval_data)):
        longest = int(part.lengths.max()) if part is not None else 0
        if longest > budget:
            raise UsageError(
                f"the longest item of the {what} data uses {longest} tokens in a micro-batch (both responses for "
                f"pairs): raise train_max_tokens_per_gpu {config.batch.max_tokens}, or "
                f"sequence_parallel_size, or lower max_len {config.data.max_len}"
            )


def _checked_layout(config: OfflineConfig, resume: Checkpoint | None, *, num_ranks: int) -> list[str]:
    """Return a notice if the states must be repartitioned. Raises UsageError if that is impossible."""
    if resume is None:
        return []
    return continuation_notice(
        resume.path / "model",
        what="model",
        zero_stage=config.deepspeed.zero_stage,
        num_ranks=num_ranks,
        tensor_parallel_size=config.deepspeed.tensor_parallel_size,
    )


def checked_identity(
    config: OfflineConfig, task: OfflineTask, resume: Checkpoint | None, *, repeats: bool = False
) -> dict[str, object]:
    """Return the facts that must match to resume. Raises UsageError if `resume` is from a different run."""
    data, model = task.items.data, task.model
    identity = {
        "command": task.command,
        "param_dtype": config.model.param_dtype,
        **model_identity("model", model.found, model.plan),
        **adapter_identity(model.plan),
        **frozen_parts_identity(model.base),
        **tokenizer_identity(model.tokenizer),
        "number of training rows": len(data.lengths),
        "number of trained tokens": int(data.num_trained.sum()),
        "contents of the training rows": data.data.fingerprint(),
        "train_batch_size": config.batch.train_batch_size,
        "max_epochs": config.batch.max_epochs,
        "max_steps": config.batch.max_steps,
        "seed": config.batch.seed,
        **supported_identity(config, "optim", besides=NOT_OF_THE_STEPS),
        **task.identity(),
    }
    if resume is not None:
        check_same_run(resume, identity, default_settings(config), repeats=repeats)
    return identity


def _build(config: OfflineConfig, task: OfflineTask) -> tuple[PreTrainedModel, DeepSpeedEngine]:
    partition = partitioned_loading(config.deepspeed, param_dtype=config.model.param_dtype)
    hf_model = load_with_adapter(
        task.load, task.model.base, task.model.plan, device=distributed.device(), partition=partition
    )
    if task.items.data.data.report.end_of_turn is not None:
        # A base model ends texts with another token than turns, so record the trained one for generation.
        end_at(hf_model, Renderer(config.template, task.model.tokenizer).end_ids)
    engine = DeepSpeedEngine(
        task.wrap(hf_model, sequence_ranks(config.deepspeed, hf_model.config)),
        config.deepspeed,
        optim=config.optim,
        learning_rate=config.optim.learning_rate,
        total_steps=_total_steps(config, task),
        param_dtype=config.model.param_dtype,
    )
    return hf_model, engine


def _total_steps(config: OfflineConfig, task: OfflineTask) -> int:
    """Return the number of optimizer steps in the run."""
    batch = config.batch
    batches = StepBatches(
        len(task.items.data.lengths), batch_size=batch.train_batch_size, epochs=batch.max_epochs, seed=batch.seed
    )
    return min(len(batches), batch.max_steps or len(batches))


@dataclass(frozen=True)
class _OfflineRun:
    """All components of a run on one rank."""

    ready: Ready
    paths: RunDirectory
    store: CheckpointStore
    identity: dict[str, object]
    plugin_files: dict[str, str]

    def tracker(self, console: Console, resume: Checkpoint | None, notices: list[str]) -> Tracker:
        config, task = self.ready.config, self.ready.task
        tracker = Tracker(
            config.tracking,
            self.paths.root,
            command=task.command,
            total_steps=_total_steps(config, task),
            console=console,
            resume_step=resume.step if resume else None,
            saved=resume.state["tracker"] if resume else None,
        )
        described = f"{config.model.pretrain}, {parameter_counts(self.ready.hf_model)}"
        model, on_gpu = task.model, distributed.device().type == "cuda"
        dtype = DTYPES[config.model.param_dtype]
        notes = attention_note(model.attention, model.architecture, dtype, on_gpu=on_gpu)
        notes |= mixers_note(model.layers, on_gpu=on_gpu)
        notes |= dtype_note(config.model, on_gpu=on_gpu)
        notes |= adapter_rate_facts(config, _adapted(task))
        together = sharing(config.batch, config.deepspeed) + splitting(config.deepspeed)
        placement = {"Placement": together[0]} if together else {}
        facts = {"Model": described, "Data": task.summary, **placement, **self.ready.memory, **notes}
        tracker.start(facts, on_alarm=alarm_event(config))
        for line in notices:
            tracker.message(line)
        return tracker

    def train(self, tracker: Tracker | SilentTracker, stop: StopSignal, *, start_step: int) -> Finished:
        ready, config = self.ready, self.ready.config
        with stop_announced(stop, tracker.message, _STOP):
            return train(
                ready.engine,
                ready.task.objective,
                data=ready.items.data,
                eval_data=ready.items.eval_data,
                share=ready.share,
                schedule=Schedule(
                    start_step=start_step,
                    total_steps=_total_steps(config, ready.task),
                    save_steps=config.checkpoint.save_steps,
                    eval_steps=config.batch.eval_steps,
                    max_skipped_steps=config.optim.max_skipped_steps,
                    stop_eval_loss=config.batch.stop_eval_loss,
                ),
                hooks=ready.hooks(
                    tracker,
                    lambda step: self.save_checkpoint(step, tracker.state()),
                    lambda: distributed.any_rank(stop()),
                ),
            )

    def save_checkpoint(self, step: int, tracker_state: dict[str, object]) -> None:
        """Save a checkpoint. Call it on each rank; rank 0 creates and publishes the folder."""
        # Leave the block on errors too, so that the partial folder is removed.
        with ExitStack() as stack:
            failures: list[RunError] = []

            def begin() -> Path | None:
                state = {"identity": self.identity, PLUGIN_FILES: self.plugin_files, "tracker": tracker_state}
                needed = self.ready.engine.checkpoint_bytes()
                try:
                    return stack.enter_context(self.store.writing(step, state, needed_bytes=needed))
                except RunError as error:
                    failures.append(error)
                    return None

            # All ranks need the folder, and must stop together if rank 0 cannot create it.
            aside = distributed.by_first_rank(begin)
            if aside is None:
                raise failures[0] if failures else SystemExit(1)  # rank 0 reports the reason
            self._save_own_part(aside / "model", step)

    def _save_own_part(self, folder: Path, step: int) -> None:
        try:
            folder.mkdir(exist_ok=True)
            ready = self.ready
            ready.engine.save(folder)
            describe_model(ready.hf_model, ready.task.model.tokenizer, folder)
            if ready.reference.save is not None:
                ready.reference.save(folder)
        except (OSError, RuntimeError) as error:
            # Ranks other than 0 have no store, so they report a short error; the launcher stops all.
            rank, _ = distributed_env.rank_and_world_size()
            if rank == 0:
                raise  # the store reports it and removes the partial checkpoint
            raise RunError(f"rank {rank} failed to write its part of the step {step} checkpoint: {error}") from error
