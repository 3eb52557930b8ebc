"""Rows of samples.jsonl and eval_samples.jsonl, with one schema for training, evaluation, `generate` and `eval`.

docs/run-directory.md lists the keys.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rlhf_cli.algorithms.kl import kl_estimate, kl_metric
from rlhf_cli.algorithms.ragged import segment_lengths, segment_mean, segment_sum
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.trainers.online.samples import Rollout, Sample, flat
from rlhf_cli.trainers.online.state import OnlineSettings

LEARNED = ("old_logprob", "ref_logprob", "ratio", "kl", "advantage")
"""Columns of training, null if the sample was not trained on or the update did not need the value."""

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


def iteration_rows(sampled: Sequence[Sample], trained: Rollout, settings: OnlineSettings) -> list[dict[str, object]]:
    """Return rows for an iteration's samples, with the update's values for samples in `trained`."""
    learned = _learned(trained, settings)
    has_reward, unlearned = settings.reward.is_given, dict.fromkeys(LEARNED)
    return [sample_row(sample, has_reward=has_reward) | learned.get(sample.id, unlearned) for sample in sampled]


def _learned(trained: Rollout, settings: OnlineSettings) -> dict[str, dict[str, float | None]]:
    """Return the update's columns by sample id."""
    rows: dict[str, dict[str, float | None]] = {}
    for first in range(0, len(trained), _ROWS_AT_ONCE):
        part = trained.part(slice(first, first + _ROWS_AT_ONCE))
        columns = _learned_columns(part, settings)
        values = zip(*columns.values(), strict=True)
        rows |= {
            sample.id: dict(zip(columns, row, strict=True)) for sample, row in zip(part.samples, values, strict=True)
        }
    return rows


def _learned_columns(trained: Rollout, settings: OnlineSettings) -> dict[str, list[float | None]]:
    """Return the update's columns, one value per sample. Sums and means are over sampled tokens, in nats."""
    cu, unknown = trained.cu, list[float | None]([None] * len(trained))
    has_tokens_B = segment_lengths(cu) > 0
    columns = dict.fromkeys(LEARNED, unknown)
    old_N = None if trained.old_logprobs is None else flat(trained.old_logprobs).double()
    if old_N is not None:
        columns["old_logprob"] = _cells(segment_sum(old_N, cu))
        log_ratio_B = segment_mean(old_N - flat(trained.rollout_logprobs).double(), cu)
        columns["ratio"] = _cells(log_ratio_B.exp(), has_tokens_B)
    if trained.advantages is not None:
        is_trained_B = trained.trained_B(settings.policy) & has_tokens_B
        columns["advantage"] = _cells(segment_mean(flat(trained.advantages).double(), cu), is_trained_B)
    for role, logprobs in trained.frozen_logprobs.items():
        frozen_N, term = flat(logprobs).double(), settings.kl_terms.get(role)
        if term is not None:
            columns[f"{role}_logprob"] = _cells(segment_sum(frozen_N, cu))
        if old_N is not None and term is not None:
            columns[kl_metric(role)] = _cells(segment_sum(kl_estimate(old_N, frozen_N, term.estimator), cu))
        elif old_N is not None:
            columns[kl_metric(role)] = _cells(segment_mean(old_N - frozen_N, cu), has_tokens_B)
        elif term is not None:
            columns[kl_metric(role)] = unknown
    return columns


def _cells(values_B: torch.Tensor, is_known_B: torch.Tensor | None = None) -> list[float | None]:
    known = [True] * len(values_B) if is_known_B is None else is_known_B.tolist()
    return [_rounded(value) if is_known else None for value, is_known in zip(values_B.tolist(), known, strict=True)]


def _rounded(value: float) -> float:
    return round(float(value), 6)  # further digits are rounding errors of the log-probs
