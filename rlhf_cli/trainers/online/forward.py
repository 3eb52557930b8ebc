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
        if role == "teacher" and settings.has_teacher_context:
            sequences = roles.store([sample.teacher_sequence for sample in rollout.samples])
        rollout.frozen_logprobs[role] = rollout.by_response(policy.logprobs(sequences))
    if needs_old:
        # The update reads them too.
        rollout.rollout_logprobs = roles.store_column(list(map(np.asarray, rollout.rollout_logprobs)))
        rollout.old_logprobs = rollout.by_response(roles.actor.logprobs(rollout.replayed_sequences))
    if roles.critic is not None:
        asked = with_bootstrap_targets(rollout) if settings.critic.bootstrap_truncated else rollout.sequences
        values = rollout.by_response(roles.critic.values(asked))
        if settings.critic.bootstrap_truncated:
            values, rollout.bootstrap = split_last_values(values, rollout.truncated_B)
        rollout.values = values
