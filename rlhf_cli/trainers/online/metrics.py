"""Metrics of an online iteration's responses."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlhf_cli.algorithms.groups import is_alike
from rlhf_cli.data.rollouts import Episode, Generation
from rlhf_cli.rewards.records import Score
from rlhf_cli.trainers.online.samples import Rollout, Sample
from rlhf_cli.trainers.online.state import LoopState, OnlineSettings

MAX_SOURCES = 32
"""Maximum number of sources with separate metrics: a column with more values is not a source."""


def rollout_metrics(generations: Sequence[Generation], scores: Sequence[Score]) -> dict[str, float]:
    """Return rewards, verdicts and lengths of an iteration's responses. Failed rewards are excluded from means."""
    return rollout_rewards(scores) | length_metrics(generations)


def rollout_rewards(scores: Sequence[Score]) -> dict[str, float]:
    """Return rewards, verdicts and additional reward metrics. Failed rewards are excluded from means."""
    values = [score.value for score in scores if score.value is not None]
    # Rewards without a verdict have no accuracy.
    judged = [score.status for score in scores if score.status in ("correct", "wrong", "invalid")]
    metrics = {
        "reward": float(np.mean(values)) if values else 0.0,
        "reward_std": float(np.std(values)) if values else 0.0,
    }
    if judged:
        metrics["accuracy"] = judged.count("correct") / len(judged)
    parts: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            parts.setdefault(f"reward/{name}", []).append(value)
        for name, value in score.metrics.items():
            parts.setdefault(name, []).append(value)
    return metrics | {name: float(np.mean(part)) for name, part in parts.items()}


def source_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return rewards and verdicts per source, if rows name several but at most `MAX_SOURCES`."""
    found: dict[str, list[Score]] = {}
    for sample in samples:
        if sample.prompt.data_source is not None:
            found.setdefault(sample.prompt.data_source, []).append(sample.score)
    if not 1 < len(found) <= MAX_SOURCES:
        return {}
    return {
        f"source/{source}/{name}": value
        for source, of_source in found.items()
        for name, value in rollout_rewards(of_source).items()
        if name in ("reward", "accuracy")
    }


def zero_std_metrics(scores: Sequence[Score], groups: Sequence[int]) -> dict[str, float]:
    """Return the share of groups with equal scores, named as in TRL; {} without a group of at least two scores.

    Args:
        groups: group number per response.
    """
    values: dict[int, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        if score.value is not None:
            values.setdefault(group, []).append(score.value)
    compared = [is_alike(min(of_group), max(of_group)) for of_group in values.values() if len(of_group) > 1]
    return {"frac_reward_zero_std": float(np.mean(compared))} if compared else {}


def clip_metrics(scores: Sequence[Score], clip_range: tuple[float, float] | None) -> dict[str, float]:
    """Return the share of scores changed by --reward_clip_range; {} without it."""
    values = [score.value for score in scores if score.value is not None]
    if clip_range is None or not values:
        return {}
    low, high = clip_range
    return {"reward_clipped": float(np.mean([not low <= value <= high for value in values]))}


def clipped_flat(values_B: Sequence[float], groups: Sequence[int], clip_range: tuple[float, float]) -> bool:
    """Return whether some groups have different scores, and clipping makes them equal in all groups."""
    low, high = clip_range
    by_group: dict[int, list[float]] = {}
    for value, group in zip(values_B, groups, strict=True):
        by_group.setdefault(group, []).append(value)
    spreads = [(min(values), max(values)) for values in by_group.values()]
    differing = [spread for spread in spreads if not is_alike(*spread)]
    return bool(differing) and all(is_alike(*(min(max(v, low), high) for v in spread)) for spread in differing)


def failure_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return the share of failed rewards, and counts by kind of failure."""
    counts = Counter(score.failure for score in scores if score.failure is not None)
    share = {"reward_failed": float(np.mean([score.status == "failed" for score in scores]))}
    return share | {f"reward/failed_{kind}": float(count) for kind, count in sorted(counts.items())}


def greedy_metrics(greedy: Rollout | None) -> dict[str, float]:
    """Return the mean score of greedy responses, if any."""
    return {} if greedy is None else {"greedy_reward": float(greedy.scores_B.mean())}


def length_metrics(generations: Sequence[Generation]) -> dict[str, float]:
    """Return response lengths in sampled tokens, the truncated share, and episode metrics."""
    lengths = np.array([generation.num_sampled for generation in generations])
    return {
        "response_length": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "truncated": float(np.mean([generation.finish_reason == "length" for generation in generations])),
        **episode_metrics(generations),
    }


def episode_metrics(generations: Sequence[Generation]) -> dict[str, float]:
    """Return means over episodes with an environment; {} without."""
    found = [(generation, generation.episode) for generation in generations if generation.episode is not None]
    if not found:
        return {}
    lengths = [len(generation.token_ids) + sum(len(one.token_ids) for one in e.earlier) for generation, e in found]
    observed = [length - generation.num_sampled for length, (generation, _) in zip(lengths, found, strict=True)]
    return {
        "episode/turns": float(np.mean([episode.num_turns for _, episode in found])),
        "episode/calls": float(np.mean([episode.num_calls for _, episode in found])),
        "episode/malformed_calls": float(np.mean([episode.num_malformed for _, episode in found])),
        "episode/observed_tokens": float(np.mean(observed)),
        "episode/failed": float(np.mean([episode.failure is not None for _, episode in found])),
        "episode/truncated": float(np.mean([episode.cut != "" for _, episode in found])),
        **_program_metrics([episode for _, episode in found if episode.num_repeated is not None]),
    }


def _program_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means over agent program episodes; {} without."""
    if not episodes:
        return {}
    return {
        "episode/branches": float(np.mean([len(episode.earlier) + 1 for episode in episodes])),
        "episode/repeated_requests": float(np.mean([episode.num_repeated or 0 for episode in episodes])),
    }


def mean_of_steps(steps: Sequence[dict[str, float]], *, prefix: str = "") -> dict[str, float]:
    """Merge metrics over an iteration's optimizer steps: means, and maxima for counts and names that end in `_max`."""
    names = steps[0].keys()
    merge = {name: np.max if name.endswith("_max") or name.startswith("skipped_") else np.mean for name in names}
    return {prefix + name: float(merge[name]([step[name] for step in steps])) for name in names}


def controlled(settings: OnlineSettings, state: LoopState, metrics: dict[str, float]) -> dict[str, float]:
    """Return the controlled loss weights at the start of an iteration, as metrics."""
    kl = {"kl_coef": state.kl_coef} if "kl" in metrics else {}
    if settings.policy.entropy_target is None:
        return kl
    return kl | {"entropy_coef": state.weights(settings).entropy.weight}
