"""Losses of the Tinker API, with its names, inputs and defaults (tinker-docs.thinkingmachines.ai/tinker/losses).

A loss is a sum over tokens, so gradients of several requests and micro-batches add up to those of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rlhf_cli.errors import UsageError, did_you_mean, listed

TARGETS = "target_tokens"
"""Loss input with the token that each position predicts."""
_RATIO_MASK = "sequence_ratio_mask"

_Columns = Mapping[str, torch.Tensor]
_Config = Mapping[str, float]


def _cross_entropy(logprobs_K: torch.Tensor, columns: _Columns, _: _Config) -> torch.Tensor:
    return -(logprobs_K * columns["weights"])


def _importance_sampling(logprobs_K: torch.Tensor, columns: _Columns, _: _Config) -> torch.Tensor:
    return -torch.exp(logprobs_K - columns["logprobs"]) * columns["advantages"]


def _clipped(ratio_K: torch.Tensor, advantages_K: torch.Tensor, config: _Config) -> torch.Tensor:
    """Return PPO's loss per token: the lower of the clipped and the unclipped objective."""
    bounded_K = ratio_K.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio_K * advantages_K, bounded_K * advantages_K)


def _ppo(logprobs_K: torch.Tensor, columns: _Columns, config: _Config) -> torch.Tensor:
    return _clipped(torch.exp(logprobs_K - columns["logprobs"]), columns["advantages"], config)


def _cispo(logprobs_K: torch.Tensor, columns: _Columns, config: _Config) -> torch.Tensor:
    ratio_K = torch.exp(logprobs_K.detach() - columns["logprobs"])
    bounded_K = ratio_K.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -bounded_K * logprobs_K * columns["advantages"]


def _dro(logprobs_K: torch.Tensor, columns: _Columns, config: _Config) -> torch.Tensor:
    square_K = (logprobs_K - columns["logprobs"]) ** 2
    return -(logprobs_K * columns["advantages"] - 0.5 * config["beta"] * square_K)


def _gspo(logprobs_K: torch.Tensor, columns: _Columns, config: _Config) -> torch.Tensor:
    is_counted_K = columns[_RATIO_MASK] != 0
    fixed_K = logprobs_K.detach()
    # The value of the ratio is that of the sequence, its gradient that of the token's own log-prob (GSPO-token).
    mean = (fixed_K - columns["logprobs"])[is_counted_K].mean() if is_counted_K.any() else fixed_K.new_zeros(())
    return _clipped(torch.exp(mean + logprobs_K - fixed_K), columns["advantages"], config)


@dataclass(frozen=True)
class TinkerLoss:
    """A loss of the Tinker API.

    - `function`: (log-probs [K], inputs [K] by name, config) -> losses [K] of a sequence.
    - `inputs`: names of its inputs, in addition to `target_tokens`.
    - `defaults`: values of `loss_fn_config`; None if the request must set one, because Tinker names no default.
    """

    function: Callable[[torch.Tensor, _Columns, _Config], torch.Tensor]
    inputs: tuple[str, ...]
    defaults: Mapping[str, float | None] = field(default_factory=dict)

    def config(self, name: str, given: Mapping[str, float | str]) -> dict[str, float]:
        """Return the config with defaults. Raises UsageError for an unknown, missing or non-numeric value."""
        for key, value in given.items():
            if key not in self.defaults:
                known = f"it has {listed(self.defaults)}" if self.defaults else "it has none"
                raise UsageError(f"loss_fn_config: {name} has no parameter {key!r}; {known}")
            if isinstance(value, str):
                raise UsageError(f"loss_fn_config: {key} of {name} must be a number, not {value!r}")
        values = {**self.defaults, **given}
        if missing := [key for key, value in values.items() if value is None]:
            subject = "they have" if len(missing) > 1 else "it has"
            raise UsageError(f"loss_fn_config: {name} requires {listed(missing)}: {subject} no default")
        return {key: float(value) for key, value in values.items() if value is not None}


_SAMPLED = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES = {
    "cross_entropy": TinkerLoss(_cross_entropy, ("weights",)),
    "importance_sampling": TinkerLoss(_importance_sampling, _SAMPLED),
    "ppo": TinkerLoss(_ppo, _SAMPLED, _CLIP),
    # One-sided: the lower threshold clips nothing.
    "cispo": TinkerLoss(_cispo, _SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": TinkerLoss(_dro, _SAMPLED, {"beta": None}),
    "gspo": TinkerLoss(_gspo, (*_SAMPLED, _RATIO_MASK), dict.fromkeys(_CLIP)),
}
"""Losses by name."""

_ABSENT = {
    "stable_reinforce": "its formula is not published; use importance_sampling, ppo or cispo",
    "custom": "losses on the server are not supported; pass a function to forward_backward_custom",
}


def tinker_loss(name: str) -> TinkerLoss:
    """Return the loss. Raises UsageError if this server does not have it."""
    if name in LOSSES:
        return LOSSES[name]
    if name in _ABSENT:
        raise UsageError(f"loss_fn {name}: {_ABSENT[name]}")
    raise UsageError(f"loss_fn {name!r} is unknown{did_you_mean(name, LOSSES)}; available: {', '.join(LOSSES)}")
