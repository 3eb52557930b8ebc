"""From an online iteration's responses to policy and critic samples.

Pure functions over flat arrays. The loop computes log-probs and values with the models.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from rlhf_cli.algorithms.advantages import compute_advantages, drawn_to_teacher, over_spans
from rlhf_cli.algorithms.aggregation import CORRECT, OBSERVED, PROMPT_TOKENS
from rlhf_cli.algorithms.estimators.estimator import Advantages, Experience, Turns
from rlhf_cli.algorithms.groups import scale_of
from rlhf_cli.algorithms.kl import kl_estimate, kl_metric
from rlhf_cli.algorithms.ragged import segment_ids, segment_lengths, segment_sum
from rlhf_cli.algorithms.shaping import clip_scores, shaped_scores, token_rewards
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.rewards import ENVIRONMENT
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.packing.packs import TOKEN_IDS, TokenSequence
from rlhf_cli.data.stored_arrays import Column, StoredArray
from rlhf_cli.rewards.model_scores import weights_of_all_parts
from rlhf_cli.trainers.online.samples import Rollout, flat
from rlhf_cli.trainers.online.state import OnlineSettings
from rlhf_cli.trainers.online.update_plan import Steps, UpdatePlan


def with_bootstrap_targets(rollout: Rollout) -> list[TokenSequence]:
    """Append one target to truncated sequences, so that the critic also values the final state.

    The token does not matter, because the state before it cannot see it.
    """
    sequences = list(rollout.sequences)
    # Only the last branch of an episode has the final state.
    lasts = rollout.sequence_bounds[1:] - 1
    for place in lasts[rollout.truncated_B.numpy()].tolist():
        s = sequences[place]
        sequences[place] = TokenSequence(
            np.append(s.token_ids, s.token_ids[-1]), np.append(s.loss_mask, True), s.pictures
        )
    return sequences


def split_last_values(values: Sequence[Column], truncated_B: torch.Tensor) -> tuple[list[Column], list[float]]:
    """Return (values per response token, bootstrap values) from values computed for `with_bootstrap_targets`."""
    cuts = truncated_B.tolist()
    own = [values[:-1] if cut else values for values, cut in zip(values, cuts, strict=True)]
    return own, [float(values[-1]) if cut else 0.0 for values, cut in zip(values, cuts, strict=True)]


def learning_samples(
    rollout: Rollout, greedy: Rollout | None, settings: OnlineSettings, *, kl_coef: float
) -> tuple[list[TokenSequence], dict[str, float]]:
    """Return one sample per trained sequence, and KL and advantage metrics.

    `greedy` are greedy responses to the same prompts, used as baselines. `kl` is the per-response KL divergence
    averaged over responses, which the adaptive controller targets. It is a metric here if it is part of the reward.
    """
    cu = rollout.cu
    experience, kl_N = experience_of(rollout, greedy, settings, kl_coef=kl_coef)
    found = compute_advantages(settings.estimator, experience, settings=settings.estimator_settings or settings.policy)
    metrics = {f"advantage/{name}": value for name, value in found.metrics.items()}
    # Add the teacher's term after normalization, whose scale depends on rewards only.
    if settings.distill_coef is not None:
        assert "teacher" in rollout.frozen_logprobs, "distill_coef requires a teacher"
        log_ratio_N = _log_ratio(rollout, "teacher")
        if rollout.teacher_spans is not None:
            log_ratio_N = over_spans(log_ratio_N, rollout.spans_N)
            metrics["aligned"] = rollout.num_spans / max(len(log_ratio_N), 1)
        drawn_N = drawn_to_teacher(found.at_tokens(cu), log_ratio_N, coef=settings.distill_coef)
        found = replace(found, per_token_N=drawn_N, per_response_B=None)
    for role, logprobs in rollout.frozen_logprobs.items():
        if role not in settings.kl_terms:
            metrics[kl_metric(role)] = float(_log_ratio(rollout, role).mean())
            metrics[f"{role}_logprob"] = float(flat(logprobs).mean())
    # Keep the advantages for samples.jsonl.
    rollout.advantages = _advantages(found, cu)
    columns = _columns(rollout, settings, rollout.advantages, returns_N=found.returns_N)
    if settings.policy.loss_agg == "prompt_mean":
        columns[PROMPT_TOKENS] = _prompt_tokens(experience)
    if settings.policy.correct_nll_coef:
        columns[CORRECT] = _correct_tokens(rollout)
    samples = [
        sample
        for i in torch.nonzero(experience.trained_B).squeeze(1).tolist()
        for sample in _samples_of(rollout, i, {name: values[i] for name, values in columns.items()})
    ]
    metrics["advantage_abs"] = _mean_magnitude(found, cu, experience.trained_B)
    if kl_N is not None:
        metrics["kl"] = float(segment_sum(kl_N, cu).mean())
    return samples, metrics


def experience_of(
    rollout: Rollout, greedy: Rollout | None, settings: OnlineSettings, *, kl_coef: float
) -> tuple[Experience, torch.Tensor | None]:
    """Return (input for the estimator, KL divergence per token `[N]` if it is part of the reward)."""
    # With a KL loss the divergence is part of the objective instead of the reward.
    kl_N = None if "ref" in settings.kl_losses else _kl(rollout, settings.policy)
    scores_B = _rewards(rollout, settings)
    only_scores = kl_N is None and settings.estimator.steps != "tokens"
    rewards_N = None if only_scores else token_rewards(scores_B, kl_N, rollout.cu, kl_coef=kl_coef)
    shaped_N = None if rewards_N is None else _shaped(rollout, settings, rewards_N)
    return _experience(rollout, greedy, settings, shaped_N=shaped_N, scores_B=scores_B), kl_N


def _shaped(rollout: Rollout, settings: OnlineSettings, rewards_N: torch.Tensor) -> torch.Tensor:
    """Return token rewards with those of steps and turns, for estimators that use the time of rewards."""
    if settings.estimator.steps != "tokens":
        return rewards_N
    # NaN marks tokens that do not end a step.
    if rollout.step_rewards is not None:
        rewards_N = rewards_N + settings.step_weight * flat(rollout.step_rewards).nan_to_num(0.0)
    if any(one.episode is not None for one in rollout.responses):
        rewards_N = rewards_N + _moved_to_turns(rollout, settings.reward)
    return rewards_N


def _advantages(found: Advantages, cu: torch.Tensor) -> list[np.ndarray]:
    """Return float32 advantages per token of each response."""
    if found.per_response_B is None:
        return _split(found.at_tokens(cu), cu)
    values_B = found.per_response_B.float().numpy()
    return [
        np.broadcast_to(value, length) for value, length in zip(values_B, segment_lengths(cu).tolist(), strict=True)
    ]


def _mean_magnitude(found: Advantages, cu: torch.Tensor, trained_B: torch.Tensor) -> float:
    """Return the mean absolute advantage over trained tokens."""
    # Masked responses have advantages but are not trained on, so exclude them.
    if found.per_response_B is None:
        advantages_N = found.at_tokens(cu)
        return float(advantages_N[trained_B[segment_ids(cu, len(advantages_N))]].abs().mean())
    lengths_B = segment_lengths(cu) * trained_B
    return float((found.per_response_B.double().abs() * lengths_B).sum() / lengths_B.sum())


def _samples_of(rollout: Rollout, number: int, columns: dict[str, Column]) -> list[TokenSequence]:
    """Return a response's samples, one per sequence, from its token columns."""
    first, end = rollout.sequence_bounds[number : number + 2].tolist()
    sequences = rollout.replayed_sequences[first:end]
    if len(sequences) == 1:
        return [_with_columns(sequences[0], columns)]
    bounds = itertools.pairwise(itertools.accumulate((sequence.num_trained for sequence in sequences), initial=0))
    return [
        _with_columns(sequence, {name: values[start:stop] for name, values in columns.items()})
        for sequence, (start, stop) in zip(sequences, bounds, strict=True)
    ]


def _with_columns(sequence: TokenSequence, columns: Mapping[str, Column]) -> TokenSequence:
    stored = {name: column for name, column in columns.items() if isinstance(column, StoredArray)}
    own = {name: column for name, column in columns.items() if not isinstance(column, StoredArray)}
    return replace(sequence, columns=own, stored=sequence.stored | stored)


def with_observations(samples: list[TokenSequence], policy: PolicyConfig) -> list[TokenSequence]:
    """Return the samples with the observations between their turns as additional targets, which the column `OBSERVED`
    marks; unchanged without `observation_nll_coef`. The other columns are 0 for them.
    """
    return [_with_observations(sample) for sample in samples] if policy.observation_nll_coef else samples


def _with_observations(sample: TokenSequence) -> TokenSequence:
    (turns_T,) = np.nonzero(sample.loss_mask)
    mask = sample.loss_mask.copy()
    if turns_T.size:  # an episode may end before its first turn
        mask[turns_T[0] : turns_T[-1] + 1] = True
    is_observed_K = ~sample.loss_mask[mask]
    columns = {OBSERVED: is_observed_K.astype(np.float32)}
    for name, values in sample.all_columns.items():
        columns[name] = np.zeros(is_observed_K.size, np.float32)
        columns[name][~is_observed_K] = values
    stored = {name: array for name, array in sample.stored.items() if name == TOKEN_IDS}
    return replace(sample, loss_mask=mask, columns=columns, stored=stored)


def plan_over_samples(plan: UpdatePlan, rollout: Rollout, policy: PolicyConfig) -> UpdatePlan:
    """Convert a plan over trained responses to a plan over the samples from `learning_samples`."""
    counts_B = np.diff(rollout.sequence_bounds)[rollout.trained_B(policy).numpy()]
    firsts_B = np.cumsum(counts_B) - counts_B
    places = [np.arange(first, first + count) for first, count in zip(firsts_B, counts_B, strict=True)]

    def over_samples(steps: Steps) -> Steps:
        return [np.concatenate([places[number] for number in step.tolist()]) for step in steps]

    return UpdatePlan(over_samples(plan.actor), over_samples(plan.critic))


def _moved_to_turns(rollout: Rollout, reward: RewardConfig) -> torch.Tensor:
    """Return the reward change per token, `[N]`, that moves each turn's environment reward from the response's last
    token to the turn's last token. It sums to 0 per response.

    Cumulative rewards are clipped like the total score; otherwise the last token would compensate for the clipped part.
    """
    # float64, because the moved rewards of a response must cancel.
    moved_N = torch.zeros(int(rollout.cu[-1]), dtype=torch.float64)
    weight = weights_of_all_parts(reward).get(ENVIRONMENT, 0.0)
    for end, generation in zip(rollout.cu[1:].tolist(), rollout.responses, strict=True):
        if weight and generation.episode is not None:
            lengths = np.array([stop - start for start, stop in generation.turns])
            ends = end - lengths.sum() + lengths.cumsum() - 1
            so_far = weight * torch.tensor(generation.episode.turn_rewards, dtype=torch.float64).cumsum(0)
            rewards = clip_scores(so_far, reward.reward_clip_range).diff(prepend=so_far.new_zeros(1))
            moved_N[torch.from_numpy(ends)] += rewards
            # The total score already contains the turn rewards at the last token, so remove them there.
            moved_N[int(ends[-1])] -= rewards.sum()
    return moved_N


def _experience(
    rollout: Rollout,
    greedy: Rollout | None,
    settings: OnlineSettings,
    *,
    shaped_N: torch.Tensor | None,
    scores_B: torch.Tensor,
) -> Experience:
    """Return the input for advantage estimation. `shaped_N` is None if rewards are nothing but the scores."""
    return Experience(
        shaped_N=shaped_N,
        parts=weighted_parts(rollout, settings.reward) if settings.estimator.rewards_apart else (),
        values_N=None if rollout.values is None else flat(rollout.values),
        bootstrap_B=None if rollout.bootstrap is None else torch.tensor(rollout.bootstrap),
        cu=rollout.cu,
        groups_B=rollout.groups_B,
        trained_B=rollout.trained_B(settings.policy),
        greedy_B=None if greedy is None else _of_groups(_rewards(greedy, settings), greedy, rollout),
        steps_N=None if rollout.step_rewards is None else flat(rollout.step_rewards),
        step_weight=settings.step_weight,
        scale=scale_of(scores_B),
        scores_B=scores_B,
        turns=_turns(rollout) if settings.estimator.turns else None,
    )


def _turns(rollout: Rollout) -> Turns:
    """Return the turns of all samples. Observations are equal if their tokens are."""
    states: dict[tuple[int, bytes], int] = {}
    bounds, firsts, found = [0], [0], list[int]()
    for group, sample in zip(rollout.groups, rollout.samples, strict=True):
        for length, observation in sample.observed_turns:
            bounds.append(bounds[-1] + length)
            found.append(states.setdefault((group, observation), len(states)))
        firsts.append(len(found))
    return Turns(torch.tensor(bounds), torch.tensor(firsts), torch.tensor(found, dtype=torch.int64))


def _rewards(rollout: Rollout, settings: OnlineSettings) -> torch.Tensor:
    """Return shaped scores, float64 [B]."""
    return shaped_scores(
        rollout.scores_B,
        segment_lengths(rollout.cu),
        rollout.truncated_B,
        reward=settings.reward,
        max_new_tokens=settings.rollout.max_new_tokens,
    )


def weighted_parts(rollout: Rollout, reward: RewardConfig) -> tuple[tuple[float, torch.Tensor], ...]:
    """Return (weight, clipped values [B]) per reward."""
    weights = weights_of_all_parts(reward)
    return tuple(
        (weights[name], clip_scores(part_B, reward.reward_clip_range)) for name, part_B in rollout.parts.items()
    )


def _of_groups(values_G: torch.Tensor, greedy: Rollout, rollout: Rollout) -> torch.Tensor:
    """Return the value of the greedy response in each response's group, float64 [B]."""
    by_group = {sample.group: value for sample, value in zip(greedy.samples, values_G.tolist(), strict=True)}
    return torch.tensor([by_group[sample.group] for sample in rollout.samples], dtype=torch.float64)


def _columns(
    rollout: Rollout, settings: OnlineSettings, advantages: Sequence[np.ndarray], *, returns_N: torch.Tensor | None
) -> dict[str, Sequence[Column]]:
    """Return the columns of response tokens by name."""
    columns: dict[str, Sequence[Column]] = {
        "rollout_logprobs": rollout.rollout_logprobs,
        "advantages": advantages,
    }
    if rollout.old_logprobs is not None:
        columns["old_logprobs"] = rollout.old_logprobs
    if returns_N is not None and rollout.values is not None:
        columns |= {"old_values": rollout.values, "returns": _split(returns_N, rollout.cu)}
    return columns | {f"{role}_logprobs": rollout.frozen_logprobs[role] for role in settings.kl_losses}


def _prompt_tokens(experience: Experience) -> list[np.ndarray]:
    """Return the trained tokens of all responses to a token's prompt, float32 per response."""
    lengths_B = segment_lengths(experience.cu)
    _, group_B = experience.groups_B.unique(return_inverse=True)
    totals_G = torch.zeros(int(group_B.max()) + 1, dtype=torch.int64)
    totals_G.index_add_(0, group_B, lengths_B * experience.trained_B)
    totals = totals_G[group_B].float().numpy()
    return [np.broadcast_to(total, length) for total, length in zip(totals, lengths_B.tolist(), strict=True)]


def _correct_tokens(rollout: Rollout) -> list[np.ndarray]:
    """Return 1 for tokens of correct responses and 0 for others, float32 per response."""
    return [
        np.broadcast_to(np.float32(score.status == "correct"), response.num_sampled)
        for score, response in zip(rollout.scores, rollout.responses, strict=True)
    ]


def _kl(rollout: Rollout, policy: PolicyConfig) -> torch.Tensor | None:
    reference = rollout.frozen_logprobs.get("ref")
    if reference is None:
        return None
    assert rollout.old_logprobs is not None, "the KL divergence requires policy log-probs"
    return kl_estimate(flat(rollout.old_logprobs), flat(reference), policy.kl_estimator)


def _log_ratio(rollout: Rollout, role: str) -> torch.Tensor:
    """Return policy minus frozen-policy log-probs, `[N]`, both computed by the trainer.

    The sampler's log-probs would add numerical differences between engines to every value.
    """
    assert rollout.old_logprobs is not None, f"{role} requires policy log-probs"
    return flat(rollout.old_logprobs) - flat(rollout.frozen_logprobs[role])


def _split(values_N: torch.Tensor, cu: torch.Tensor) -> list[np.ndarray]:
    return np.split(values_N.float().numpy(), cu[1:-1].numpy())
