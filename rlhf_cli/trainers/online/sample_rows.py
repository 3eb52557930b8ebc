"""Rows of samples.jsonl and eval_samples.jsonl, with one schema for training, evaluation, `generate` and `eval`.

docs/run-directory.md lists the keys.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rlhf_cli.algorithms.kl import kl_estimate
from rlhf_cli.config.policy import PolicyConfig
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
        "rollout_logprob": _rounded(sum(response.logprobs)),
        **({"data_source": prompt.data_source} if prompt.data_source is not None else {}),
        **({"images": tuple(placed.picture for placed in prompt.pictures)} if prompt.pictures else {}),
        **episode_columns(response),
        **{f"reward/{name}": value for name, value in score.parts.items()},
        **score.metrics,
    }


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
    learned = _learned(trained, settings.policy)
    has_reward, unlearned = settings.reward.is_given, dict.fromkeys(LEARNED)
    return [sample_row(sample, has_reward=has_reward) | learned.get(sample.id, unlearned) for sample in sampled]


def _learned(trained: Rollout, policy: PolicyConfig) -> dict[str, dict[str, float | None]]:
    """Return the update's columns by sample id. Sums and means are over sampled tokens, in nats."""
    rows: dict[str, dict[str, float | None]] = {}
    is_trained = trained.trained_B(policy).tolist()
    for number, sample in enumerate(trained.samples):
        rollout, old, ref, teacher, advantages = (
            None if column is None else column[number].astype(np.float64)
            for column in (
                trained.rollout_logprobs,
                trained.old_logprobs,
                trained.frozen_logprobs.get("ref"),
                trained.frozen_logprobs.get("teacher"),
                trained.advantages if is_trained[number] else None,
            )
        )
        assert rollout is not None
        row: dict[str, float | None] = dict.fromkeys(LEARNED)
        if old is not None:
            row["old_logprob"] = _rounded(old.sum())
        if ref is not None:
            row["ref_logprob"] = _rounded(ref.sum())
        if old is not None and len(old):
            row["ratio"] = _rounded(np.exp((old - rollout).mean()))
        if old is not None and ref is not None:
            kl_T = kl_estimate(torch.from_numpy(old), torch.from_numpy(ref), policy.kl_estimator)
            row["kl"] = _rounded(kl_T.sum().item())
        if advantages is not None and len(advantages):
            row["advantage"] = _rounded(advantages.mean())
        if old is not None and teacher is not None:
            row["teacher_kl"] = _rounded((old - teacher).mean()) if len(old) else None
        rows[sample.id] = row
    return rows


def _rounded(value: float) -> float:
    return round(float(value), 6)  # further digits are rounding errors of the log-probs
