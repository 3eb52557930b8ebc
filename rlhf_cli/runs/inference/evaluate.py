"""Implementation of `rlhf eval`: models answer the prompts one by one, then metrics are computed."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from rlhf_cli.backends.cluster.ray_cluster import may_have_gpus, ray_cluster
from rlhf_cli.backends.process.output_lock import output_lock
from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.backends.rollout.backend_choice import rollout_backend
from rlhf_cli.backends.rollout.vllm_arguments import check_vllm_args
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.data.prompts import PASS_RATE
from rlhf_cli.data.selection import write_rows
from rlhf_cli.errors import UsageError
from rlhf_cli.options import to_yaml
from rlhf_cli.rewards.evaluation import Answer, by_source, evaluate_answers, pass_rate
from rlhf_cli.rewards.records import Score
from rlhf_cli.runs.inference.asking import Asking
from rlhf_cli.runs.inference.model_groups import describe_groups, grouped_models
from rlhf_cli.runs.inference.output_folder import (
    FIGURES,
    answers_folder,
    check_folder,
    installed_versions,
    prepare_folder,
    rows_done,
    tracking_of,
)
from rlhf_cli.runs.inference.run import (
    STEP_SCORES,
    InferenceHooks,
    ModelUnderTest,
    model_identity,
    model_under_test,
    settings_identity,
)
from rlhf_cli.runs.inference.tasks import run_tasks
from rlhf_cli.runs.plan_proof import record_plan, sampled_settings
from rlhf_cli.runs.reward_check import check_rewards
from rlhf_cli.runs.run_directory import LOGS
from rlhf_cli.runs.stop_notice import stop_announced
from rlhf_cli.tracking.sinks import SAMPLES_FILE, read_samples
from rlhf_cli.tracking.terminal.console import quiet_process
from rlhf_cli.tracking.terminal.evaluation_table import EvaluatedModel, evaluation_table, print_table
from rlhf_cli.tracking.tracker import Tracker
from rlhf_cli.trainers.online.evaluation import source_names


@dataclass(frozen=True)
class EvalRun:
    """A checked evaluation run. `rows` is the number of existing rows when resuming, else None."""

    config: EvalConfig
    models: list[ModelUnderTest]
    identity: dict[str, object]
    rows: int | None

    @property
    def begins(self) -> list[int]:
        """First unanswered chunk per model."""
        left, begins = self.rows or 0, []
        for tested in self.models:
            # Rows are written model by model, so whole chunks of the first models come first.
            begins.append(tested.chunks.whole(left))
            left = max(0, left - tested.chunks.num_prompts * tested.chunks.num_samples)
        return begins

    @property
    def is_answered(self) -> bool:
        return all(begin == len(tested.chunks) for begin, tested in zip(self.begins, self.models, strict=True))


def run_evaluation(config: EvalConfig) -> None:
    """Answer the remaining prompts, then show and write the metrics. Exits with 130 after Ctrl-C."""
    if config.benchmark.tasks is not None:
        run_tasks(config)
        return
    with ExitStack() as stack:
        root = stack.enter_context(answers_folder(config.out.output))
        # Lock before checking: two evaluations of one folder must not mix their rows.
        stack.enter_context(output_lock(root))
        check_folder(root, config.out)
        run = _check(config, root)
        stop = StopSignal()
        prepare_folder(root, to_yaml(config), run.identity, keep=run.rows is not None)
        terminal = stack.enter_context(quiet_process(root / LOGS / "driver.log"))
        tracker = Tracker(
            tracking_of(config.out),
            root,
            command="eval",
            total_steps=sum(len(tested.chunks) for tested in run.models),
            console=terminal.console,
            resume_step=None if run.rows is None else sum(run.begins),
            unit="chunk",
        )
        stack.enter_context(tracker)
        kept = "with its rows saved" if config.out.output else "and nothing is saved without --output"
        with stop_announced(stop, tracker.message, f"a chunk is answered, {kept}"):
            is_answered = _answer(run, root, tracker, stop)
        if is_answered:
            results = results_of(run, root)
            tracker.close(facts=_write(run, root, results), has_course=False)
            terminal.console.print()
            print_table(terminal.console, evaluation_table(results))
        else:
            how = "the same command with --load_checkpoint" if config.out.output else "nothing was saved: set --output"
            tracker.close(outcome="interrupted", facts={"Continue": how}, has_course=False)
    # After the block, so that files and locks are released first.
    if not is_answered:
        sys.exit(INTERRUPTED)


def _check(config: EvalConfig, root: Path) -> EvalRun:
    """Run all checks that need no process. Raises UsageError if a check fails."""
    backend, min_p = rollout_backend(config.engine), config.sampling.min_p
    check_vllm_args(config.engine, backend=backend, on_cpu=not may_have_gpus(), min_p=min_p)
    models: list[ModelUnderTest] = []
    for name in config.model.names:
        model = config.model.model_copy(update={"pretrain": name})
        # Chunks are numbered over all models, so that metrics.jsonl has increasing steps.
        first_step = 1 + sum(len(tested.chunks) for tested in models)
        tested = model_under_test(
            config.model_copy(update={"model": model}),
            first_step=first_step,
            cells={"pretrain": name},
            prm_pretrain=config.reward.prm_pretrain,
        )
        models.append(tested)
    settings = settings_identity(config, models[0].reward_model, models[0].model.architecture)
    identity = {"command": "eval"} | settings
    identity["prm_pretrain"] = config.reward.prm_pretrain
    identity |= models[0].facts_of_models
    # Prefix facts with the model's name, because their values differ between models.
    for tested in models:
        facts = model_identity(tested)
        identity |= {f"{what} of {tested.cells['pretrain']}": value for what, value in facts.items()}
    run = EvalRun(config, models, identity, rows_done(root, config.out, identity))
    rates = config.out.write_pass_rate
    if rates is not None and not Path(rates).absolute().parent.is_dir():
        raise UsageError(f"--write_pass_rate {rates}: folder not found: {Path(rates).absolute().parent}")
    if not run.is_answered:
        sets = [tested.data.prompts for tested in models]
        is_episode = config.episodes.plays_episodes
        check_rewards(config.reward, *sets, is_episode=is_episode, judge=models[0].judge)
    return run


def _answer(run: EvalRun, root: Path, tracker: Tracker, stop: StopSignal) -> bool:
    """Answer the remaining chunks, model by model. Returns whether all are complete."""
    config, many = run.config, len(run.models) > 1
    facts = {"Models" if many else "Model": ", ".join(config.model.names)}
    facts["Prompts"] = run.models[0].data.report.summary
    is_kept = config.out.output is not None
    if not is_kept:
        facts["Output"] = "metrics only; --output FOLDER saves all responses"
    if run.is_answered:
        tracker.start(facts, is_kept=is_kept)
        return True
    left = [number for number, tested in enumerate(run.models) if run.begins[number] < len(tested.chunks)]
    with ray_cluster() as cluster:
        # Other nodes cannot read a temporary folder on this machine.
        if not is_kept and len(cluster.node_gpus) > 1 and any(tested.model.parts for tested in run.models):
            raise UsageError(
                "adapters and checkpoints are merged for the engines: set --output to a folder on all nodes"
            )
        groups = grouped_models(run.models, cluster=cluster)
        if many and (described := describe_groups(groups, cluster=cluster)):
            facts["Adapters"] = described
        asking = Asking(run.models, run.begins, left, root, cluster, facts, is_kept, InferenceHooks(tracker, stop))
        is_answered = all(asking.answer(group) for group in groups)
        if not many:  # the times of several models are not those of one plan
            record_plan(root, sampled_settings(run.models[0].data.prompts, cluster))
        return is_answered


@dataclass(frozen=True)
class _Answered:
    """Samples for one prompt, read from samples.jsonl."""

    pretrain: str
    group: int
    source: str
    data_source: str | None
    answers: list[Answer]


def _answered(root: Path) -> Iterator[_Answered]:
    """Yield prompts with their samples, model by model."""
    # The rows of a prompt are adjacent, so the file is never loaded as a whole.
    for (pretrain, index), rows in groupby(
        read_samples(root / SAMPLES_FILE), key=lambda row: (row["pretrain"], row["group"])
    ):
        samples = list(rows)
        first = samples[0]
        yield _Answered(pretrain, index, first["source"], first.get("data_source"), list(map(answer_of, samples)))


def answer_of(row: dict[str, Any]) -> Answer:
    score = Score(row["reward"], row["verdict"], row["detail"], answer=row["answer"])
    steps = tuple(row[STEP_SCORES]) if STEP_SCORES in row else None
    return Answer(score, length=row["length"], truncated=row["finish_reason"] == "length", steps=steps)


def results_of(run: EvalRun, root: Path) -> list[EvaluatedModel]:
    """Compute each model's metrics per dataset, and over all datasets if there are several."""
    rows = []
    for pretrain, prompts in groupby(_answered(root), key=lambda answered: answered.pretrain):
        answered = list(prompts)
        names = source_names(answered)
        of_names = by_source((name, prompt.answers) for name, prompt in zip(names, answered, strict=True))
        for source, samples in of_names.items():
            evaluation = evaluate_answers(
                samples,
                ks=run.config.ks,
                pass_score=run.config.statistics.pass_score,
                aggregations=run.config.reward.prm_aggregation,
            )
            rows.append(EvaluatedModel(pretrain, source, run.config.sampling.n_samples_per_prompt, evaluation))
    return rows


def _write(run: EvalRun, root: Path, results: list[EvaluatedModel]) -> dict[str, str]:
    """Write eval.json and, if set, the pass rates. Returns summary lines with the files."""
    written = {
        "results": [result.as_json() for result in results],
        "settings": yaml.safe_load(to_yaml(run.config)),
        "versions": installed_versions(),
    }
    # Write and rename, so that an interrupted run leaves no partial file.
    temporary = root / f"{FIGURES}.tmp"
    temporary.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, root / FIGURES)
    facts = {"Figures": str(root / FIGURES), "Responses": str(root / SAMPLES_FILE)} if run.config.out.output else {}
    if run.config.out.write_pass_rate is None:
        return facts
    path = Path(run.config.out.write_pass_rate)
    write_rows(path, rows_with_pass_rate(run, root))
    return facts | {"Pass rates": str(path)}


def rows_with_pass_rate(run: EvalRun, root: Path) -> Iterator[dict[str, Any]]:
    """Yield the prompt rows as read, with a pass rate each; null if no response has a verdict."""
    data = run.models[0].data
    for answered in _answered(root):
        rate = pass_rate(answered.answers, pass_score=run.config.statistics.pass_score)
        yield {**data.row_of(data.prompts[answered.group]), PASS_RATE: rate}
