"""Rows of samples.jsonl and eval_samples.jsonl, with one schema for training, evaluation, `generate` and `eval`.

docs/run-directory.md lists the keys.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rlhf_cli.algorithms.kl import kl_estimate, kl_metric
from rlhf_cli.config.roles import KLTerm
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.trainers.online.samples import Rollout, Sample
from rlhf_cli.trainers.online.state import OnlineSettings

LEARNED = ("old_logprob", "ref_logprob", "ratio", "kl", "advantage")
"""Columns of training, null if the sample was not trained on or the update did not need the value."""


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
    """Return the update's columns by sample id. Sums and means are over sampled tokens, in nats."""
    rows: dict[str, dict[str, float | None]] = {}
    is_trained = trained.trained_B(settings.policy).tolist()
    for number, sample in enumerate(trained.samples):
        rollout, old, advantages = (
            None if column is None else column[number].astype(np.float64)
            for column in (
                trained.rollout_logprobs,
                trained.old_logprobs,
                trained.advantages if is_trained[number] else None,
            )
        )
        assert rollout is not None
        row: dict[str, float | None] = dict.fromkeys(LEARNED)
        if old is not None:
            row["old_logprob"] = _rounded(old.sum())
        if old is not None and len(old):
            row["ratio"] = _rounded(np.exp((old - rollout).mean()))
        if advantages is not None and len(advantages):
            row["advantage"] = _rounded(advantages.mean())
        for role, logprobs in trained.frozen_logprobs.items():
            row |= _compared(role, logprobs[number].astype(np.float64), old, settings.kl_terms.get(role))
        rows[sample.id] = row
    return rows


def _compared(role: str, frozen: np.ndarray, old: np.ndarray | None, term: KLTerm | None) -> dict[str, float | None]:
    """Return the columns of a frozen policy: sums with a KL term, the mean log-ratio without one."""
    if term is None:
        return {} if old is None else {kl_metric(role): _rounded((old - frozen).mean()) if len(old) else None}
    kl_T = None if old is None else kl_estimate(torch.from_numpy(old), torch.from_numpy(frozen), term.estimator)
    return {
        f"{role}_logprob": _rounded(frozen.sum()),
        kl_metric(role): None if kl_T is None else _rounded(kl_T.sum().item()),
    }


def _rounded(value: float) -> float:
    return round(float(value), 6)  # further digits are rounding errors of the log-probs
