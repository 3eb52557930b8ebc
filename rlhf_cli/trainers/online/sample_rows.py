"""Rows of samples.jsonl and eval_samples.jsonl, with one schema for training, evaluation, `generate` and `eval`.

docs/run-directory.md lists the keys.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from rlhf_cli.algorithms.kl import kl_estimate, kl_metric
from rlhf_cli.algorithms.ragged import segment_lengths, segment_mean, segment_sum
from rlhf_cli.config.roles import KLTerm
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.data.stored_arrays import Column
from rlhf_cli.trainers.online.interfaces import BySample, Cells, by_all_samples
from rlhf_cli.trainers.online.samples import Rollout, Sample, flat
from rlhf_cli.trainers.online.state import OnlineSettings

LEARNED = ("old_logprob", "ref_logprob", "ratio", "kl", "advantage")
"""Columns of training, null if the sample was not trained on or the update did not need the value."""

_OLD, _ENGINE = "old_logprobs", "rollout_logprobs"  # other columns have the names of roles

_ROWS_AT_ONCE = 256
"""Rows that are computed together: calls per row would take most of the time, and all rows at once would need copies of
all tokens."""


def sample_row(sample: Sample, *, has_reward: bool = True) -> dict[str, object]:
    """Return a sample's row. `reward` and `verdict` are null without a reward."""
    prompt, response, score = sample.prompt, sample.response, sample.score
    return {
        "id": sample.id,
        "source": prompt.source,
        "row": prompt.index,
        "group": sample.group,
        "sample": sample.index,
        "weight_version": response.weight_version,
        **({"weight_versions": response.version_runs} if response.version_runs else {}),
        "prompt": prompt.text,
        "response": sample.text,
        "label": prompt.label,
        "reward": score.value if has_reward else None,
        "verdict": score.status if has_reward else None,
        "detail": score.detail,
        "answer": score.answer,
        "length": response.num_sampled,
        "finish_reason": response.finish_reason,
        "rollout_logprob": _rounded(_sum(response.logprobs)),
        **({"data_source": prompt.data_source} if prompt.data_source is not None else {}),
        **({"images": tuple(placed.picture for placed in prompt.pictures)} if prompt.pictures else {}),
        **episode_columns(response),
        **{f"reward/{name}": value for name, value in score.parts.items()},
        **score.metrics,
        **({"judgements": score.judgements} if score.judgements else {}),
    }


def _sum(logprobs: Sequence[float]) -> float:
    """Add from left to right: NumPy's sum adds in another order, which changes the last digits."""
    return float(np.add.accumulate(np.asarray(logprobs, dtype=np.float64))[-1]) if len(logprobs) else 0.0


def episode_columns(response: Generation) -> dict[str, object]:
    """Return an episode's turns, turn rewards and earlier branches as row columns."""
    if response.episode is None:
        return {}
    episode = response.episode
    texts = {name: text for name, text in (("opening", episode.opening), ("cut", episode.cut)) if text}
    branches = {"branches": [list(branch.messages) for branch in episode.earlier]} if episode.earlier else {}
    return {**texts, "messages": list(episode.messages), "turn_rewards": list(episode.turn_rewards), **branches}


def iteration_rows(
    sampled: Sequence[Sample], trained: Rollout, settings: OnlineSettings, *, by_sample: BySample = by_all_samples
) -> list[dict[str, object]]:
    """Return rows for an iteration's samples, with the update's values for samples in `trained`.

    `by_sample`: as in `Roles`.
    """
    learned = _learned(trained, settings, by_sample)
    has_reward, unlearned = settings.reward.is_given, dict.fromkeys(LEARNED)
    return [sample_row(sample, has_reward=has_reward) | learned.get(sample.id, unlearned) for sample in sampled]


def _learned(trained: Rollout, settings: OnlineSettings, by_sample: BySample) -> dict[str, dict[str, float | None]]:
    """Return the update's columns by sample id."""
    if not len(trained):
        return {}
    columns: Cells = dict.fromkeys(LEARNED, [None] * len(trained))
    if trained.advantages is not None:
        columns["advantage"] = _advantages(trained.advantages, trained.trained_B(settings.policy).tolist())
    if trained.old_logprobs is not None or trained.frozen_logprobs:
        parts = by_sample(partial(_logprob_cells, settings.kl_terms), _logprobs(trained))
        columns |= {name: [value for part in parts for value in part[name]] for name in parts[0]}
    rows = zip(*columns.values(), strict=True)
    return {sample.id: dict(zip(columns, row, strict=True)) for sample, row in zip(trained.samples, rows, strict=True)}


def _advantages(advantages: Sequence[np.ndarray], is_trained_B: Sequence[bool]) -> list[float | None]:
    """Return the mean of each response; None without tokens, or if it is not trained on."""
    found: list[float | None] = []
    for first in range(0, len(advantages), _ROWS_AT_ONCE):
        part = advantages[first : first + _ROWS_AT_ONCE]
        # Often all tokens of a response have the same value.
        if all(values.strides == (0,) for values in part):
            means = [float(values[0]) if values.size else 0.0 for values in part]
        else:
            means = segment_mean(flat(part).double(), _bounds(part)).tolist()
        is_known = (is_own and values.size for is_own, values in zip(is_trained_B[first:], part, strict=False))
        found += [_rounded(mean) if is_one else None for mean, is_one in zip(means, is_known, strict=True)]
    return found


def _bounds(columns: Sequence[Column]) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *map(len, columns)]))


def _logprobs(trained: Rollout) -> dict[str, Sequence[Column]]:
    """Return the columns that `_logprob_cells` reads."""
    old = {} if trained.old_logprobs is None else {_OLD: trained.old_logprobs, _ENGINE: trained.rollout_logprobs}
    return {**old, **trained.frozen_logprobs}


def _logprob_cells(terms: Mapping[str, KLTerm], columns: Mapping[str, Sequence[Column]]) -> Cells:
    """Return sums and means of log-probs over sampled tokens, in nats, one value per sample.

    `terms`: KL terms by role.
    """
    found: Cells = {}
    count = len(next(iter(columns.values())))
    for first in range(0, count, _ROWS_AT_ONCE):
        part = {name: column[first : first + _ROWS_AT_ONCE] for name, column in columns.items()}
        for name, values in _cells_at_once(terms, part).items():
            found.setdefault(name, []).extend(values)
    return found


def _cells_at_once(terms: Mapping[str, KLTerm], columns: Mapping[str, Sequence[Column]]) -> Cells:
    cu = _bounds(next(iter(columns.values())))
    has_tokens_B = segment_lengths(cu) > 0
    by_role = {name: flat(column).double() for name, column in columns.items()}
    cells: Cells = {}
    old_N, engine_N = by_role.pop(_OLD, None), by_role.pop(_ENGINE, None)
    if old_N is not None and engine_N is not None:
        cells["old_logprob"] = _cells(segment_sum(old_N, cu))
        cells["ratio"] = _cells(segment_mean(old_N - engine_N, cu).exp(), has_tokens_B)
    for role, frozen_N in by_role.items():
        term = terms.get(role)
        if term is not None:
            cells[f"{role}_logprob"] = _cells(segment_sum(frozen_N, cu))
        if old_N is not None and term is not None:
            cells[kl_metric(role)] = _cells(segment_sum(kl_estimate(old_N, frozen_N, term.estimator), cu))
        elif old_N is not None:
            cells[kl_metric(role)] = _cells(segment_mean(old_N - frozen_N, cu), has_tokens_B)
        elif term is not None:
            cells[kl_metric(role)] = [None] * len(has_tokens_B)
    return cells


def _cells(values_B: torch.Tensor, is_known_B: torch.Tensor | None = None) -> list[float | None]:
    known = [True] * len(values_B) if is_known_B is None else is_known_B.tolist()
    return [_rounded(value) if is_known else None for value, is_known in zip(values_B.tolist(), known, strict=True)]


def _rounded(value: float) -> float:
    return round(float(value), 6)  # further digits are rounding errors of the log-probs
