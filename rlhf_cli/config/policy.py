"""The objective of online training: what all estimators have; algorithms/estimators/ adds what some have besides."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.plugins import Plugin


@dataclass(frozen=True, slots=True)
class PolicyLossRow:
    """A policy loss: its function as `module:name`, and which of the settings that only some losses read it reads."""

    function: str
    reads: tuple[str, ...] = ()


def _own(name: str, *reads: str) -> PolicyLossRow:
    return PolicyLossRow(f"rlhf_cli.algorithms.policy_loss:{name}", reads)


POLICY_LOSSES = {
    "clip": _own("ppo_clip", "eps_clip", "eps_clip_low_high", "dual_clip"),
    "gspo": _own("gspo", "eps_clip", "eps_clip_low_high"),
    "cispo": _own("cispo", "cispo_eps_high"),
    "sapo": _own("sapo", "sapo_tau"),
    "reinforce": _own("reinforce"),
}

LossAgg = Literal["token_mean", "seq_mean", "seq_sum_norm"]
KLEstimator = Literal["k1", "k2", "k3"]
RolloutCorrection = Literal["token_clip", "token_mask", "seq_mask", "off"]

READ_BY = {
    setting: tuple(name for name, row in POLICY_LOSSES.items() if setting in row.reads)
    for setting in dict.fromkeys(setting for row in POLICY_LOSSES.values() for setting in row.reads)
}
"""Losses that read a setting; it has to be left at its default under other losses of the table."""


class PolicyConfig(SettingsGroup):
    """Policy objective"""

    policy_loss: Annotated[str, Plugin(tuple(POLICY_LOSSES), ("logprobs_K", "anchor_K", "columns", "settings"))] = (
        "clip"
    )
    """PPO's clip, GSPO (sequence ratios; sets its own eps_clip_low_high and loss_agg), CISPO, SAPO, or no ratio; or a
    function of your own."""
    advantage_estimator: Annotated[
        str | None, Plugin((), ("experience", "settings"), records=("Estimator",), may_have_settings=True)
    ] = None
    """Function of your own that computes advantages, or a row of the table of estimators; by default the command's."""
    loss_agg: LossAgg = "token_mean"
    """Mean over the tokens of a step, mean over its responses, or sum over responses x max_new_tokens (Dr. GRPO)."""
    eps_clip: Annotated[float, Needs("policy_loss", READ_BY["eps_clip"])] = Field(0.2, gt=0)
    """PPO's clip of the probability ratio to [1 - eps, 1 + eps]."""
    eps_clip_low_high: Annotated[tuple[float, float] | None, Needs("policy_loss", READ_BY["eps_clip_low_high"])] = None
    """Different clip below and above 1; replaces eps_clip."""
    dual_clip: Annotated[float | None, Needs("policy_loss", READ_BY["dual_clip"])] = Field(None, gt=1)
    """Bound on the loss of negative advantages, in ratios; off by default."""
    cispo_eps_high: Annotated[float, Needs("policy_loss", READ_BY["cispo_eps_high"])] = Field(5.0, gt=1)
    """Largest ratio that weighs a token under cispo."""
    sapo_tau: Annotated[tuple[float, float], Needs("policy_loss", READ_BY["sapo_tau"])] = (1.0, 1.05)
    """Steepness of sapo's gate for positive and for negative advantages."""
    init_kl_coef: float = Field(0.01, ge=0)
    """Weight of the KL divergence from the reference; 0 loads no reference model."""
    use_kl_loss: bool = False
    """Add the KL divergence to the loss instead of taking it off the reward; with kl_estimator k2 or k3."""
    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL divergence per token (Schulman)."""
    kl_target: float | None = Field(None, gt=0)
    """KL per response in nats that an adaptive coefficient steers to; fixed coefficient by default."""
    kl_horizon: Annotated[int, Needs("kl_target")] = Field(10_000, gt=0)
    """Samples over which the adaptive coefficient reacts."""
    entropy_loss_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; its start value under entropy_target."""
    entropy_target: float | None = Field(None, gt=0)
    """Entropy in nats below which the bonus grows after each step, and above which it shrinks and does not count."""
    entropy_delta: Annotated[float, Needs("entropy_target")] = Field(1e-4, gt=0)
    """Change of the entropy bonus's weight per step under entropy_target."""
    entropy_max: Annotated[float, Needs("entropy_target")] = Field(5e-3, gt=0)
    """Largest weight of the entropy bonus under entropy_target."""
    mask_truncated: bool = False
    """Do not train on responses that were cut at max_new_tokens; their scores still count in their group."""
    rollout_correction: RolloutCorrection = "token_clip"
    """What corrects for engine and trainer disagreeing on probabilities."""
    rollout_correction_range: Annotated[
        tuple[float, float], Needs("rollout_correction", ("token_mask", "seq_mask"))
    ] = (0.5, 5.0)
    """Ratios of trainer to engine that are kept: of tokens by token_mask, of sequences (geometric mean) by seq_mask."""
    rollout_correction_cap: Annotated[float, Needs("rollout_correction", ("token_clip",))] = Field(2.0, gt=0)
    """Largest ratio under token_clip."""

    @property
    def eps_clip_low(self) -> float:
        """How far below 1 the ratio is clipped."""
        return self.eps_clip if self.eps_clip_low_high is None else self.eps_clip_low_high[0]

    @property
    def eps_clip_high(self) -> float:
        """How far above 1 the ratio is clipped."""
        return self.eps_clip if self.eps_clip_low_high is None else self.eps_clip_low_high[1]

    @property
    def has_kl_loss(self) -> bool:
        """Whether the loss has a term of the KL divergence."""
        return self.use_kl_loss and self.init_kl_coef > 0

    @model_validator(mode="after")
    def _ranges_hold_a_ratio_of_one(self) -> "PolicyConfig":
        low, high = self.eps_clip_low, self.eps_clip_high
        if not (0 < low <= 1 and high > 0):
            raise ValueError(f"clip of {low:g} below and {high:g} above 1: need 0 < below <= 1 and above > 0")
        low, high = self.rollout_correction_range
        if not 0 <= low < 1 < high:
            raise ValueError(f"rollout_correction_range {low:g} {high:g} must reach from below 1 to above 1")
        if min(self.sapo_tau) <= 0:
            raise ValueError(f"sapo_tau {self.sapo_tau[0]:g} {self.sapo_tau[1]:g}: both must be above 0")
        return self

    @model_validator(mode="after")
    def _divergence_has_a_weight(self) -> "PolicyConfig":
        if self.kl_target is not None and not self.init_kl_coef:
            raise ValueError("kl_target steers init_kl_coef, which is 0: then no KL divergence is measured")
        if self.use_kl_loss and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 in the loss has a gradient of zero expectation: with use_kl_loss give k2 or k3"
            )
        if self.entropy_target is not None and self.entropy_loss_coef > self.entropy_max:
            raise ValueError(f"entropy_loss_coef {self.entropy_loss_coef:g} is above entropy_max {self.entropy_max:g}")
        return self
