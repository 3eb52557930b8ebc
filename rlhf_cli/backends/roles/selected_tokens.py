"""Adds the token selections of an optimizer step to an actor's micro-batches."""

from collections.abc import Callable

import torch
from torch import nn

from rlhf_cli.algorithms.policy_loss import PolicyColumns, clip_cov
from rlhf_cli.algorithms.token_selection import (
    clip_cov_tokens,
    covariances,
    high_entropy_tokens,
    kl_cov_tokens,
    random_keys,
)
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.data.packing.packs import MicroBatch

KEPT, COVARIANT = "kept", "covariant"
"""Columns of the selections."""

_Packed = Callable[[int | None], list[MicroBatch]]
"""Maximum number of tokens -> this rank's micro-batches of a step."""


def selecting(engine: DeepSpeedEngine, packed: _Packed, settings: RoleSettings) -> _Packed:
    """Return the function that packs a step, which also adds the columns `KEPT` and `COVARIANT` if the policy needs
    them. Call it on all ranks.
    """
    if not settings.policy.selects_tokens:
        return packed
    return lambda max_tokens: _with_selections(engine, packed(max_tokens), settings)


def _with_selections(engine: DeepSpeedEngine, batches: list[MicroBatch], settings: RoleSettings) -> list[MicroBatch]:
    policy = settings.policy

    def forward(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        logprobs_K, entropy_K = model(batch.pack, temperature=settings.temperature, with_entropy=True)
        return _table(logprobs_K, entropy_K, batch, policy, seed=settings.seed)

    own = engine.infer(batches, forward)
    table_N5, start = distributed.gather_rows(torch.cat(own), ranks_per_pack=settings.deepspeed.ranks_per_pack)
    entropy_N, logprobs_N, advantages_N, clipped_N, keys_N = table_N5.unbind(1)
    chosen = {}
    if policy.top_entropy_quantile < 1:
        chosen[KEPT] = high_entropy_tokens(entropy_N, policy.top_entropy_quantile)
    if policy.policy_loss == "clip_cov":
        chosen[COVARIANT] = clip_cov_tokens(covariances(logprobs_N, advantages_N), clipped_N, keys_N, policy)
    elif policy.policy_loss == "kl_cov":
        chosen[COVARIANT] = kl_cov_tokens(covariances(logprobs_N, advantages_N), policy)
    found = []
    for batch, table in zip(batches, own, strict=True):
        for name, chosen_N in chosen.items():
            batch = batch.with_column(name, chosen_N[start : start + len(table)])
        found.append(batch)
        start += len(table)
    return found


def _table(
    logprobs_K: torch.Tensor, entropy_K: torch.Tensor, batch: MicroBatch, policy: PolicyConfig, *, seed: int
) -> torch.Tensor:
    """Return entropy, log-prob, advantage, whether the ratio clips, and a random key per token, float64 [K, 5]."""
    columns = batch.columns
    rollout_K, advantages_K = columns["rollout_logprobs"], columns["advantages"]
    anchor_K = columns.get("old_logprobs", logprobs_K)
    plain = PolicyColumns(rollout_K, advantages_K, batch.pack.cu_trained)
    _, flags = clip_cov(logprobs_K, anchor_K, plain, policy)
    clipped_K = flags["clip_low"] + flags["clip_high"]
    keys_K = random_keys(rollout_K, batch.pack.targets_K, seed=seed)
    # float64 represents keys exactly.
    return torch.stack([part.double() for part in (entropy_K, logprobs_K, advantages_K, clipped_K, keys_K)], dim=1)
