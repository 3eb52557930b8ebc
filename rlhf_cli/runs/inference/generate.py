"""Implementation of `rlhf generate`: a model answers prompts, all rows are saved, and some are selected."""

import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.backends.cluster.ray_cluster import may_have_gpus, ray_cluster
from rlhf_cli.backends.process.output_lock import output_lock
from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.backends.rollout.backend_choice import described, rollout_backend
from rlhf_cli.backends.rollout.vllm_arguments import check_vllm_args
from rlhf_cli.commands.generate import GenerateConfig
from rlhf_cli.data.selection import select_samples, summary, write_rows
from rlhf_cli.errors import RunError
from rlhf_cli.options import to_yaml
from rlhf_cli.runs.inference.output_folder import SELECTED, check_folder, prepare_folder, rows_done, tracking_of
from rlhf_cli.runs.inference.run import (
    InferenceHooks,
    ModelUnderTest,
    answer_prompts,
    model_identity,
    model_under_test,
    settings_identity,
)
from rlhf_cli.runs.plan_proof import record_plan, sampled_settings
from rlhf_cli.runs.reward_check import check_rewards
from rlhf_cli.runs.run_directory import LOGS
from rlhf_cli.runs.stop_notice import stop_announced
from rlhf_cli.tracking.sinks import SAMPLES_FILE, read_samples
from rlhf_cli.tracking.terminal.console import quiet_process
from rlhf_cli.tracking.tracker import Tracker


@dataclass(frozen=True)
class _GenerateRun:
    """A checked generation run. `done` is None unless resuming."""

    config: GenerateConfig
    tested: ModelUnderTest
    identity: dict[str, object]
    done: int | None  # number of chunks

    @property
    def is_generated(self) -> bool:
        return self.done == len(self.tested.chunks)


def run_generation(config: GenerateConfig) -> None:
    """Answer the remaining prompts, then write the selected rows. Exits with 130 after Ctrl-C."""
    root = Path(config.out.output)
    with ExitStack() as stack:
        # Lock before checking: two runs with one folder must not mix their rows.
        stack.enter_context(output_lock(root))
        check_folder(root, config.out)
        run = _check(config, root)
        stop = StopSignal()
        prepare_folder(root, to_yaml(config), run.identity, keep=run.done is not None)
        terminal = stack.enter_context(quiet_process(root / LOGS / "driver.log"))
        tracker = Tracker(
            tracking_of(config.out),
            root,
            command="generate",
            total_steps=len(run.tested.chunks),
            console=terminal.console,
            resume_step=run.done,
            unit="chunk",
        )
        stack.enter_context(tracker)
        with stop_announced(stop, tracker.message, "a chunk is answered, with its rows saved"):
            is_generated = _generate(run, root, tracker, stop)
        if is_generated:
            tracker.close(facts={"Responses": str(root / SAMPLES_FILE)} | _select(config, root))
        else:
            tracker.close(outcome="interrupted", facts={"Continue": "the same command with --load_checkpoint"})
    # After the block, so that files and locks are released first.
    if not is_generated:
        sys.exit(INTERRUPTED)


def _check(config: GenerateConfig, root: Path) -> _GenerateRun:
    """Run all checks that need no process. Raises UsageError if a check fails."""
    backend, min_p = rollout_backend(config.engine), config.sampling.min_p
    check_vllm_args(config.engine, backend=backend, on_cpu=not may_have_gpus(), min_p=min_p)
    tested = model_under_test(config)
    settings = settings_identity(config, tested.reward_model, tested.model.architecture)
    identity = {"command": "generate"} | settings | tested.facts_of_models | model_identity(tested)
    rows = rows_done(root, config.out, identity)
    run = _GenerateRun(config, tested, identity, None if rows is None else tested.chunks.whole(rows))
    if config.reward.is_given and not run.is_generated:
        # Without remaining prompts no reward runs, so its processes need not start.
        is_episode = config.episodes.plays_episodes
        check_rewards(config.reward, tested.data.prompts, is_episode=is_episode, judge=tested.judge)
    return run


def _generate(run: _GenerateRun, root: Path, tracker: Tracker, stop: StopSignal) -> bool:
    """Answer the remaining chunks. Returns whether all are complete."""
    tested, log_dir = run.tested, root / LOGS
    facts = {"Model": run.config.model.pretrain, "Prompts": tested.data.report.summary}
    if run.is_generated:
        tracker.start(facts)
        return True

    def announce(placement: str) -> None:
        engine = described(run.config.engine, tested.backend)
        model = {"Reward model": tested.reward_model.source.pretrain} if tested.reward_model else {}
        model |= {"Judge": tested.judge.described} if tested.judge else {}
        tracker.start(facts | model | {"Engine": engine, "Placement": placement, "Logs": str(log_dir)})

    with ray_cluster() as cluster:
        is_generated = answer_prompts(
            tested,
            begin=run.done or 0,
            cluster=cluster,
            root=root,
            log_dir=log_dir,
            announce=announce,
            hooks=InferenceHooks(tracker, stop),
        )
        record_plan(root, sampled_settings(tested.data.prompts, cluster))
        return is_generated


def _select(config: GenerateConfig, root: Path) -> dict[str, str]:
    """Write selected.jsonl if selection is enabled. Returns the summary line."""
    if config.out.select == "none":
        return {}
    counts: Counter[str] = Counter()
    # Read from the file instead of memory: there may be millions of rows, also from earlier runs.
    write_rows(root / SELECTED, select_samples(read_samples(root / SAMPLES_FILE), config.out, counts))
    if not counts["rows"]:
        raise RunError(f"no rows selected ({summary(counts)}); all responses are in {root / SAMPLES_FILE}")
    return {"Selected": f"{root / SELECTED}: {summary(counts)}"}
