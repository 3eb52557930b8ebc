"""Forward passes of all models on an iteration's responses, before the update."""

import numpy as np

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
    # One model at a time: on shared GPUs only one fits.
    for role, policy in roles.frozen_policies.items():
        sequences = rollout.sequences
        if role == "teacher" and (settings.has_teacher_context or settings.teacher_tokens):
            taught = rollout.taught_sequences(settings.teacher_tokens)
            rollout.teacher_rows = [one.teacher_rows for one in taught if one.teacher_rows is not None] or None
            sequences = roles.store([one.teacher_reads or one for one in taught])
        rollout.frozen_logprobs[role] = rollout.by_response(policy.logprobs(sequences))
    if needs_old:
        # The update reads them too.
        rollout.rollout_logprobs = roles.store_column(list(map(np.asarray, rollout.rollout_logprobs)))
        rollout.old_logprobs = rollout.by_response(roles.actor.logprobs(rollout.replayed_sequences))
        spread_over_spans(rollout)
    if roles.critic is not None:
        asked = with_bootstrap_targets(rollout) if settings.critic.bootstrap_truncated else rollout.sequences
        values = rollout.by_response(roles.critic.values(asked))
        if settings.critic.bootstrap_truncated:
            values, rollout.bootstrap = split_last_values(values, rollout.truncated_B)
        rollout.values = values


def spread_over_spans(rollout: Rollout) -> None:
    """Convert teacher log-probs from teacher tokens to policy tokens: each span's sum, divided equally.

    Tokens outside spans get the policy's log-prob, which makes the difference 0.
    """
    if rollout.teacher_rows is None:
        return
    assert rollout.old_logprobs is not None, "a teacher is compared with the policy's log-probs"
    columns = zip(rollout.old_logprobs, rollout.frozen_logprobs["teacher"], rollout.teacher_rows, strict=True)
    rollout.frozen_logprobs["teacher"] = [_spread(*map(np.asarray, column)) for column in columns]


def _spread(own_K: np.ndarray, teacher_M: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Convert log-probs from M teacher tokens to K policy tokens. `rows`: `TokenSequence.teacher_rows`."""
    found_K = own_K.copy()
    firsts, there, counts, counts_there = rows[rows[:, 2] > 0].T
    if firsts.size:
        places = _places(there, counts_there)
        sums = np.add.reduceat(teacher_M[places].astype(np.float64), np.cumsum(counts_there) - counts_there)
        found_K[_places(firsts, counts)] = np.repeat(sums / counts, counts)
    return found_K


def _places(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the indices of all tokens in spans, given their first tokens and token counts."""
    return np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
