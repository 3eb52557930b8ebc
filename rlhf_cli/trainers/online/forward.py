"""Forward passes of all models on an iteration's responses, before the update."""

from rlhf_cli.trainers.online.batch import split_last_values, with_bootstrap_targets
from rlhf_cli.trainers.online.interfaces import Actor, Roles, awake
from rlhf_cli.trainers.online.samples import Responses
from rlhf_cli.trainers.online.state import OnlineSettings


def fill_in_outputs(roles: Roles[Actor], settings: OnlineSettings, responses: Responses, *, needs_old: bool) -> None:
    """Compute log-probs and values with the current models."""
    # One model at a time: on shared GPUs only one fits, and each sleeps before the next wakes.
    for role, policy in roles.frozen_policies.items():
        with awake(policy):
            responses.frozen_logprobs[role] = responses.by_response(policy.logprobs(responses.sequences))
    if needs_old:
        with awake(roles.actor):
            responses.old_logprobs = responses.by_response(roles.actor.logprobs(responses.sequences))
    if roles.critic is not None:
        with awake(roles.critic):
            asked = with_bootstrap_targets(responses) if settings.critic.bootstrap_truncated else responses.sequences
            values = responses.by_response(roles.critic.values(asked))
        if settings.critic.bootstrap_truncated:
            values, responses.bootstrap = split_last_values(values, responses.truncated_B)
        responses.values = values
