"""Reward components for one response and their weighted sum."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_cli.config.rewards import RewardCall
from rlhf_cli.errors import RunError
from rlhf_cli.rewards.records import Score, ScoreRequest, Status
from rlhf_cli.rewards.workers.pool import ItemOutcome

# Component names for the reward file and reward servers.
FILE_PART = "reward_func"
REMOTE_PART = "remote_rm"

_VERDICT_VALUES: dict[Status, float] = {"correct": 1.0, "wrong": 0.0, "invalid": 0.0}

UNREWARDED = (
    "has no reward: set self.reward in reset or in a tool, define get_reward(self) in the class, return a non-null "
    "reward from the OpenEnv server, or pass only verifiers, such as --reward_funcs exact"
)
"""Completes a sentence about an environment that returned no reward."""

NO_REWARD = 'the agent program printed no reward: the last output line must be JSON like {"reward": 1.0}'

# Rounding error of a float64 sum, relative to the summands.
_SUM_EPS = 1e-14
# Traceback lines kept with a failed score: samples.jsonl stores them for each sample.
_TRACE_LINES = 12


def worker_part(call: RewardCall, outcome: ItemOutcome) -> Score:
    """Convert a worker outcome."""
    if outcome.failure is not None:
        return Score(None, "failed", f"{call.name} {outcome.failure.reason}", failure=outcome.failure.kind)
    if call.row.kind in ("text", "answer"):
        return Score(outcome.value, "scored", "")
    status, detail, answer, value = outcome.value
    if status == "failed":
        return Score(None, status, f"{call.name}: {detail}", failure="unjudged")
    return Score(_VERDICT_VALUES[status] if value is None else value, status, detail, answer=answer)


def judged_part(call: RewardCall, value: float, verdict: Score | None) -> Score:
    """Wrap a length or group reward. It fails if the reward needs a verdict and the verifier failed."""
    if call.row.needs_verdict and verdict is not None and verdict.value is None:
        return Score(None, "failed", verdict.detail, failure=verdict.failure)
    return Score(value, "scored", "")


def episode_part(request: ScoreRequest) -> Score:
    """Return the environment reward. It fails if the episode has none."""
    if request.episode_reward is None:
        return Score(None, "failed", NO_REWARD, failure="environment")
    return Score(request.episode_reward, "scored", "")


def unless_broken(score: Score, request: ScoreRequest) -> Score:
    """Fail the score if the episode's environment broke, whatever the other rewards returned."""
    if request.episode_failure is None:
        return score
    detail = f"the environment {request.episode_failure}"
    return replace(score, value=None, status="failed", detail=detail, failure="environment")


def unless_unrewarded(score: Score, request: ScoreRequest) -> Score:
    """Fail the score if the episode's environment returned no reward."""
    if not request.lacks_reward:
        return score
    detail = f"the environment {UNREWARDED}"
    return replace(score, value=None, status="failed", detail=detail, parts={}, failure="environment")


def is_correct(verdict: Score | None) -> bool | None:
    """Return whether the verifier accepted the answer; None without a verifier."""
    return None if verdict is None else verdict.status == "correct"


def file_parts(outcome: ItemOutcome, num_responses: int) -> list[Score]:
    """Convert the outcome from one reward function call, one result per response."""
    failure = outcome.failure
    if failure is not None:
        trace = "\n".join(failure.trace.splitlines()[:_TRACE_LINES])
        detail = f"{FILE_PART} {failure.reason}\n{trace}".strip()
        return [Score(None, "failed", detail, failure=failure.kind)] * num_responses
    return [_file_part(result) for result in outcome.value]


def _file_part(result: dict[str, Any]) -> Score:
    metrics = {f"{FILE_PART}/{name}": value for name, value in result["metrics"].items()}
    if result["value"] is None:
        return Score(None, "failed", f"{FILE_PART} {result['problem']}", failure="bad_result", metrics=metrics)
    return Score(result["value"], "scored", "", filter=result["filter"], metrics=metrics)


def remote_part(outcome: ItemOutcome) -> Score:
    """Convert a reward server outcome."""
    if outcome.failure is not None:
        return Score(None, "failed", f"{REMOTE_PART} {outcome.failure.reason}", failure=outcome.failure.kind)
    return Score(outcome.value, "scored", "")


def join(parts: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Sum weighted components into a score. The first verifier, if any, sets the verdict.

    Without components the value is 0: only a reward model scores, and `with_model_scores` adds that later.
    """
    if not parts:
        return Score(0.0, "scored")
    values = {name: part.value for name, part in parts.items() if part.value is not None}
    judgements = [judgement for part in parts.values() for judgement in part.judgements]
    if len(values) < len(parts):
        failed = next(part for part in parts.values() if part.value is None)
        return Score(None, "failed", failed.detail, values, failure=failed.failure, judgements=judgements)
    first = next((part for part in parts.values() if part.status != "scored"), next(iter(parts.values())))
    total = _total([weights[name] * value for name, value in values.items()])
    # A sum of finite rewards can overflow.
    if not math.isfinite(total):
        detail = f"the rewards sum to {total}"
        return Score(None, "failed", detail, values, failure="bad_result", judgements=judgements)
    metrics = {name: value for part in parts.values() for name, value in part.metrics.items()}
    return Score(
        total,
        first.status,
        first.detail,
        values,
        first.answer,
        filter=_filter(parts, weights),
        metrics=metrics,
        judgements=judgements,
    )


def _filter(parts: Mapping[str, Score], weights: Mapping[str, float]) -> float | None:
    """Return the sum for dynamic filtering, or None if no reward sets a filter value."""
    if all(part.filter is None for part in parts.values()):
        return None
    return _total(
        [
            weights[name] * (part.filter if part.filter is not None else part.value or 0.0)
            for name, part in parts.items()
        ]
    )


def _total(summands: Sequence[float]) -> float:
    """Sum the values and round pure rounding error to 0."""
    total = sum(summands)
    # 0.1 + 0.2 - 0.3 is 5.6e-17 in float64. Group-relative advantages divide by the std within a group and would turn
    # this difference into a full-size advantage.
    return 0.0 if abs(total) < sum(_SUM_EPS * abs(value) for value in summands) else total


def stop_if_too_many_failed(scores: Sequence[Score], limit: float, *, num_to_come: int = 0) -> None:
    """Raise RunError with the most frequent reason if more than `limit` (a fraction) of all scores failed.

    `num_to_come` counts scores still pending: raises as soon as they cannot bring the failure rate down to the limit.
    """
    failed = [score.detail.partition("\n")[0] for score in scores if score.value is None]
    if len(failed) > limit * (len(scores) + num_to_come):
        reason, _ = Counter(failed).most_common(1)[0]
        raise RunError(
            f"{len(failed)} of {len(scores)} rewards failed, more than --reward_max_failures {limit:g} allows: {reason}"
        )


def stop_if_all_failed(scores: Sequence[Score], *, iteration: int) -> None:
    """Raise RunError with the first reason if every score failed."""
    if all(score.value is None for score in scores):
        reason = next(score.detail for score in scores)
        raise RunError(f"iteration {iteration}: every reward failed ({reason}), there is nothing to train on")
