"""Forward passes of all models on an iteration's responses, before the update."""

from collections.abc import Sequence

import numpy as np

from rlhf_cli.algorithms.kl import LOG_RATIO_LIMIT
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.trainers.online.batch import split_last_values, with_bootstrap_targets
from rlhf_cli.trainers.online.interfaces import Actor, Roles
from rlhf_cli.trainers.online.samples import Rollout
from rlhf_cli.trainers.online.state import OnlineSettings


def fill_in_outputs(roles: Roles[Actor], settings: OnlineSettings, rollout: Rollout, *, needs_old: bool) -> None:
    """Compute log-probs and values with the current models. Frozen policies outside the loss are compared with the
    policy's log-probs, so they always require these.
    """
    needs_old = needs_old or not roles.frozen_policies.keys() <= settings.kl_losses.keys()
    rollout.sequences = roles.store(rollout.sequences)
    taught: list[TokenSequence] = []
    # One model at a time: on shared GPUs only one fits.
    for role, policy in roles.frozen_policies.items():
        sequences = rollout.sequences
        if role == "teacher" and (settings.has_teacher_context or settings.teacher_tokens):
            taught = rollout.taught_sequences(settings.teacher_tokens)
            sequences = roles.store([one.teacher_reads or one for one in taught])
        rollout.frozen_logprobs[role] = rollout.by_response(policy.logprobs(sequences))
    if needs_old:
        # The update reads them too.
        rollout.rollout_logprobs = roles.store_column(list(map(np.asarray, rollout.rollout_logprobs)))
        rollout.old_logprobs = rollout.by_response(roles.actor.logprobs(rollout.replayed_sequences))
        if settings.teacher_tokens and taught:
            tokens = [settings.teacher_tokens[one.teacher].student for one in taught]
            has_text = [own.have_text(one.token_ids[one.loss_mask]) for own, one in zip(tokens, taught, strict=True)]
            spread_over_spans(rollout, [one.teacher_rows for one in taught if one.teacher_rows is not None], has_text)
    if roles.critic is not None:
        asked = with_bootstrap_targets(rollout) if settings.critic.bootstrap_truncated else rollout.sequences
        values = rollout.by_response(roles.critic.values(asked))
        if settings.critic.bootstrap_truncated:
            values, rollout.bootstrap = split_last_values(values, rollout.truncated_B)
        rollout.values = values


def spread_over_spans(rollout: Rollout, rows: Sequence[np.ndarray], has_text: Sequence[np.ndarray]) -> None:
    """Convert teacher log-probs from teacher tokens to policy tokens, and set the spans of the rollout.

    The sum over a span is divided equally among its tokens with text. Tokens outside spans get the policy's log-prob,
    which makes the difference 0. Tokens without text, which no teacher reads, get `-LOG_RATIO_LIMIT`.

    Args:
        rows: `TokenSequence.teacher_rows` per response.
        has_text: whether each sampled token has text, bool [K] per response.
    """
    assert rollout.old_logprobs is not None, "a teacher is compared with the policy's log-probs"
    columns = zip(rollout.old_logprobs, rollout.frozen_logprobs["teacher"], rows, has_text, strict=True)
    found = [_spread(*map(np.asarray, column)) for column in columns]
    rollout.frozen_logprobs["teacher"] = [values for values, _ in found]
    rollout.teacher_spans = [spans for _, spans in found]


def _spread(
    own_K: np.ndarray, teacher_M: np.ndarray, rows: np.ndarray, has_text_K: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (log-probs for K policy tokens from M teacher tokens, spans as in `Rollout.teacher_spans`)."""
    found_K = np.where(has_text_K, own_K, -LOG_RATIO_LIMIT).astype(own_K.dtype)
    spans_K = np.where(has_text_K, -1, len(own_K) + np.arange(len(own_K)))
    firsts, there, counts, counts_there = rows[rows[:, 3] > 0].T
    if firsts.size:
        offsets = np.cumsum(counts_there) - counts_there
        sums = np.add.reduceat(teacher_M[_places(there, counts_there)].astype(np.float64), offsets)
        places, numbers = _places(firsts, counts), np.repeat(np.arange(len(firsts)), counts)
        places, numbers = places[has_text_K[places]], numbers[has_text_K[places]]
        found_K[places] = (sums / np.bincount(numbers))[numbers]
        spans_K[places] = firsts[numbers]
    return found_K, spans_K


def _places(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the indices of all tokens in spans, given their first tokens and token counts."""
    return np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
