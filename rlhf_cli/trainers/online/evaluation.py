"""Evaluation during online training: answers evaluation prompts with the current weights and saves the best model.

Metrics equal `rlhf eval` (rewards/evaluation.py). Evaluation does not affect training: requests have separate seeds,
and controllers ignore its metrics.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_cli.config.evaluation import EvaluationConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import SamplingParams
from rlhf_cli.errors import RunError
from rlhf_cli.rewards.evaluation import Answer, by_source, evaluate_answers
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.offline.loop import is_due
from rlhf_cli.trainers.online.interfaces import Roles, Sampled
from rlhf_cli.trainers.online.loop import return_weights
from rlhf_cli.trainers.online.metrics import MAX_SOURCES
from rlhf_cli.trainers.online.rollout import Sampler, sample_and_score, scored_by_all
from rlhf_cli.trainers.online.sample_rows import sample_row
from rlhf_cli.trainers.online.samples import samples_of

EVALUATION = 0x6576616C  # "eval": separates evaluation seeds from training seeds


# Every evaluation adds rows to the run folder, and there may be many prompts.
MAX_KEPT_ROWS = 256
MAX_KEPT_CHARACTERS = 4_000_000
"""Maximum number of rows saved per evaluation, and their total prompt and response characters."""


class _EvaluationTracker(Protocol):
    """Tracker interface for evaluations."""

    @property
    def phase(self) -> Callable[[str | None], None]: ...

    def evaluation(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None: ...

    def evaluation_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None: ...


@dataclass(frozen=True)
class EvaluationTask:
    """Prompts and settings for evaluations.

    - `prompts`: empty to disable evaluation.
    - `seed`, `total_iterations`: from the run.
    - `engines_lose_weights`: engines that sleep between batches need a new weight push.
    - `prompts_at_once`: prompts per engine batch, None for all. An engine keeps the image inputs of a batch in memory.
    """

    config: EvaluationConfig
    reward: RewardConfig
    prompts: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    seed: int
    total_iterations: int
    engines_lose_weights: bool
    prompts_at_once: int | None = None


@dataclass(frozen=True)
class Best:
    """Best metric value so far, and its iteration."""

    iteration: int
    value: float


@dataclass(frozen=True)
class EvaluationState:
    """Checkpointed state: iteration of the last evaluation, and the best result."""

    evaluated: int | None = None
    best: Best | None = None

    def plain(self) -> dict[str, object]:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "EvaluationState":
        """Restore the state from `plain`."""
        return cls(plain["evaluated"], None if plain["best"] is None else Best(**plain["best"]))


class Evaluator:
    """Runs evaluations when due. `save_best` is called for each new best result, before the weights change."""

    def __init__(
        self,
        task: EvaluationTask,
        roles: Roles[Sampled],
        tracker: _EvaluationTracker,
        *,
        save_best: Callable[[Best], None],
        state: EvaluationState,
    ) -> None:
        self.task = task
        self._roles = roles
        self._tracker = tracker
        self._save_best = save_best
        self.state = state

    def __call__(self, iteration: int, is_last: bool) -> None:
        """Evaluate if due: before the first iteration, every `eval_steps`, and at the end. Never twice per
        iteration.
        """
        if not self.is_due(iteration, is_last):
            return
        task = self.task
        timer = PhaseTimer(on_change=self._tracker.phase)
        with timer("eval"):
            answers, rows = self._answers()
            metrics = self._metrics(answers)
            best = self._better(metrics, iteration)
            if best is not None:
                # Save before the weights change: the best model is the one that was evaluated.
                self._save_best(best)
            # Engines discard weights when sleeping on shared GPUs, and the next iteration samples immediately.
            if task.engines_lose_weights and not is_last:
                return_weights(self._roles, iteration)
        # Set the state before logging: a run that stops while logging must not evaluate again.
        self.state = EvaluationState(iteration, best or self.state.best)
        self._tracker.evaluation(iteration, metrics, timer.take())
        self._tracker.evaluation_samples(iteration, kept_rows(rows))

    def is_due(self, iteration: int, is_last: bool) -> bool:
        """Return whether an evaluation is due after this iteration."""
        task = self.task
        due = iteration == 0 or is_last or is_due(iteration, task.config.eval_steps, task.total_iterations)
        return bool(task.prompts) and due and self.state.evaluated != iteration

    def _metrics(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Compute metrics over all prompts, and per source if there are several."""
        # Samples of a prompt are adjacent.
        num_samples = self.task.config.eval_n_samples_per_prompt
        groups = [answers[i : i + num_samples] for i in range(0, len(answers), num_samples)]
        sources = by_source(zip(source_names(self.task.prompts), groups, strict=True))
        ks = [num_samples] if num_samples > 1 else []
        # The first entry has all sources together.
        everything, *apart = sources.values()
        metrics = evaluate_answers(everything, ks=ks).metrics
        for name, prompts in zip(short_names(list(sources)[1:]), apart, strict=True):
            figures = evaluate_answers(prompts, ks=ks).figures
            metrics |= {f"{name}/{figure}": found.value for figure, found in figures.items()}
        return metrics

    def _answers(self) -> tuple[list[Answer], list[dict[str, object]]]:
        """Answer all prompts. Returns scored answers, grouped by prompt, and sample rows."""
        task, roles = self.task, self._roles
        num_samples = task.config.eval_n_samples_per_prompt
        # Use the same seeds each time, so that differences are due to the model.
        seed = task.seed ^ EVALUATION
        sampler = Sampler(roles.engines, roles.scorer, task.decode, task.sampling, num_samples, seed)
        work = asyncio.run(
            sample_and_score(
                dict(enumerate(task.prompts)),
                sampler,
                PhaseTimer(),
                prompts_at_once=task.prompts_at_once,
                wakes_engines=True,
            )
        )
        samples = scored_by_all(samples_of(work.whole_groups()), roles.reward_model, task.reward)
        answers = [
            Answer(one.score, length=one.response.num_sampled, truncated=one.response.finish_reason == "length")
            for one in samples
        ]
        return answers, [sample_row(sample) for sample in samples]

    def _better(self, metrics: Mapping[str, float], iteration: int) -> Best | None:
        """Return the new best result, or None if it is not better."""
        key = self.task.config.best_metric_key
        if key is None:
            return None
        # The metric's flag may have the prefix used in logs.
        value = metrics.get(key.removeprefix("eval/"))
        if value is None:
            raise RunError(f"iteration {iteration}: evaluation metric {key} not found; available: {', '.join(metrics)}")
        so_far = self.state.best
        # Ties keep the earlier model, which has been trained less.
        return Best(iteration, value) if so_far is None or value > so_far.value else None


class _Sourced(Protocol):
    """An item with a dataset and an optional source."""

    @property
    def source(self) -> str: ...

    @property
    def data_source(self) -> str | None: ...


def source_names(prompts: Sequence[_Sourced]) -> list[str]:
    """Return each prompt's source from its row, or the dataset if sources are missing or too many."""
    named = [prompt.data_source or prompt.source for prompt in prompts]
    return named if len(set(named)) <= MAX_SOURCES else [prompt.source for prompt in prompts]


def kept_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Return the first rows, within the size limits."""
    kept: list[dict[str, object]] = []
    characters = 0
    for row in rows[:MAX_KEPT_ROWS]:
        characters += len(row["prompt"]) + len(row["response"])
        # Always keep the first row, however long it is.
        if kept and characters > MAX_KEPT_CHARACTERS:
            break
        kept.append(row)
    return kept


def short_names(sources: Sequence[str]) -> list[str]:
    """Return dataset names without folders and extensions, or full names if these are not unique."""
    stems = [Path(source).stem for source in sources]
    return stems if len(set(stems)) == len(stems) else list(sources)
