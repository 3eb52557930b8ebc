"""Objective of online training, shared by all estimators. algorithms/estimators/ adds estimator-specific settings."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.plugins import Plugin


@dataclass(frozen=True, slots=True)
class _PolicyLossRow:
    """A policy loss: its function as `module:name`, and its loss-specific settings."""

    function: str
    reads: tuple[str, ...] = ()


def _own(name: str, *reads: str) -> _PolicyLossRow:
    return _PolicyLossRow(f"rlhf_cli.algorithms.policy_loss:{name}", reads)


POLICY_LOSSES = {
    "clip": _own("ppo_clip", "eps_clip", "eps_clip_low_high", "dual_clip"),
    "gspo": _own("gspo", "eps_clip", "eps_clip_low_high"),
    "cispo": _own("cispo", "cispo_eps_high"),
    "sapo": _own("sapo", "sapo_tau"),
    "dppo_tv": _own("dppo_tv", "dppo_delta_low_high"),
    "dppo_kl": _own("dppo_kl", "dppo_delta_low_high"),
    "gmpo": _own("gmpo", "gmpo_log_clip"),
    "topr": _own("topr"),
    "clip_cov": _own("clip_cov", "eps_clip", "eps_clip_low_high", "clip_cov_ratio", "clip_cov_range"),
    "kl_cov": _own("kl_cov", "kl_cov_ratio", "kl_cov_coef"),
    "vespo": _own("vespo", "vespo_k", "vespo_lambda"),
    "reinforce": _own("reinforce"),
}

LossAgg = Literal["token_mean", "seq_mean", "seq_sum_norm", "prompt_mean"]
KLEstimator = Literal["k1", "k2", "k3"]
RolloutCorrection = Literal["token_clip", "token_mask", "seq_mask", "off"]

DPPO_DELTA = {"dppo_tv": 0.2, "dppo_kl": 0.05}
"""Default of dppo_delta_low_high by loss."""

READ_BY = {
    setting: tuple(name for name, row in POLICY_LOSSES.items() if setting in row.reads)
    for setting in dict.fromkeys(setting for row in POLICY_LOSSES.values() for setting in row.reads)
}
"""Losses that use a setting. With other built-in losses it must keep its default."""


class PolicyConfig(SettingsGroup):
    """Policy objective"""

    policy_loss: Annotated[str, Plugin(tuple(POLICY_LOSSES), ("logprobs_K", "anchor_K", "columns", "settings"))] = (
        "clip"
    )
    """Policy loss: clip (PPO), gspo (sequence ratios; changes the defaults of eps_clip_low_high and loss_agg), cispo,
    sapo, dppo_tv and dppo_kl (trust region by divergence from the rollout engine), gmpo (geometric mean; loss_agg
    seq_mean by default), topr (no ratio for positive advantages), clip_cov and kl_cov (stop or penalize the tokens that
    lower the entropy most), vespo (soft weight of the response's ratio), reinforce (no ratio), or your own function.
    """
    advantage_estimator: Annotated[
        str | None, Plugin((), ("experience", "settings"), records=("Estimator",), may_have_settings=True)
    ] = None
    """Your own advantage function or `Estimator`. Default: the command's estimator."""
    loss_agg: LossAgg = "token_mean"
    """Loss aggregation: mean over tokens, mean over responses, sum divided by responses x max_new_tokens (Dr. GRPO), or
    mean over prompts of the mean over all tokens of their responses (DAPO's formula, ScaleRL).
    """
    eps_clip: Annotated[float, Needs("policy_loss", READ_BY["eps_clip"])] = Field(0.2, gt=0)
    """Clip the probability ratio to [1 - eps, 1 + eps] (PPO)."""
    eps_clip_low_high: Annotated[tuple[float, float] | None, Needs("policy_loss", READ_BY["eps_clip_low_high"])] = None
    """Separate clip ranges below and above 1. Overrides eps_clip."""
    dual_clip: Annotated[float | None, Needs("policy_loss", READ_BY["dual_clip"])] = Field(None, gt=1)
    """Dual-clip limit on the ratio for negative advantages. Disabled by default."""
    cispo_eps_high: Annotated[float, Needs("policy_loss", READ_BY["cispo_eps_high"])] = Field(5.0, gt=1)
    """Maximum ratio that weights a token in cispo."""
    sapo_tau: Annotated[tuple[float, float], Needs("policy_loss", READ_BY["sapo_tau"])] = (1.0, 1.05)
    """Temperatures of sapo's gate for positive and negative advantages."""
    dppo_delta_low_high: Annotated[tuple[float, float] | None, Needs("policy_loss", READ_BY["dppo_delta_low_high"])] = (
        None
    )
    """Divergence from the rollout engine beyond which dppo stops the gradient of tokens that became less (low) or more
    (high) likely. Default: 0.2 0.2 for dppo_tv, a difference of probabilities; 0.05 0.05 for dppo_kl, in nats.
    """
    gmpo_log_clip: Annotated[float, Needs("policy_loss", READ_BY["gmpo_log_clip"])] = Field(0.4, gt=0)
    """Clip log-ratios of tokens to +- this value in gmpo."""
    clip_cov_ratio: Annotated[float, Needs("policy_loss", READ_BY["clip_cov_ratio"])] = Field(2e-4, gt=0, le=1)
    """Fraction of the step's tokens whose gradient clip_cov stops."""
    clip_cov_range: Annotated[tuple[float, float], Needs("policy_loss", READ_BY["clip_cov_range"])] = (1.0, 5.0)
    """Covariances of log-prob and advantage among which clip_cov draws these tokens."""
    kl_cov_ratio: Annotated[float, Needs("policy_loss", READ_BY["kl_cov_ratio"])] = Field(2e-4, gt=0, le=1)
    """Fraction of the step's tokens, those with the highest covariance, that kl_cov penalizes."""
    kl_cov_coef: Annotated[float, Needs("policy_loss", READ_BY["kl_cov_coef"])] = Field(1.0, gt=0)
    """Weight of the penalty in kl_cov, the absolute log-ratio."""
    vespo_k: Annotated[tuple[float, float], Needs("policy_loss", READ_BY["vespo_k"])] = (2.0, 3.0)
    """Exponents of the response's ratio in vespo for positive and negative advantages."""
    vespo_lambda: Annotated[tuple[float, float], Needs("policy_loss", READ_BY["vespo_lambda"])] = (3.0, 2.0)
    """Decay rates with the response's ratio in vespo for positive and negative advantages."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Train only on this fraction of the step's tokens, those with the highest entropy (arXiv 2506.01939, with 0.2). 1
    trains on all.
    """
    off_policy_mask_threshold: float | None = Field(None, gt=0)
    """Exclude responses with negative advantage whose log-probs have fallen below the rollout engine's by more than
    this value, in nats per token (DeepSeek-V3.2). Disabled by default; 0.5 is a start.
    """
    init_kl_coef: float = Field(0.01, ge=0)
    """KL penalty coefficient; 0 loads no reference model."""
    use_kl_loss: bool = False
    """Add the KL penalty to the loss instead of the reward. Use with kl_estimator k2 or k3."""
    unbiased_kl: Annotated[bool, Needs("use_kl_loss")] = False
    """Multiply the KL term in the loss by the ratio, so that its gradient is unbiased off-policy (DeepSeek-V3.2)."""
    kl_estimator: KLEstimator = "k1"
    """Estimator for the per-token KL divergence (Schulman)."""
    kl_target: float | None = Field(None, gt=0)
    """Target KL per response in nats for an adaptive coefficient. Default: fixed coefficient."""
    kl_horizon: Annotated[int, Needs("kl_target")] = Field(10_000, gt=0)
    """Number of samples over which the adaptive coefficient adjusts."""
    entropy_loss_coef: float = Field(0.0, ge=0)
    """Entropy bonus coefficient; with entropy_target, its initial value."""
    entropy_target: float | None = Field(None, gt=0)
    """Target entropy in nats. Below it, the bonus grows after each step; above it, the bonus shrinks and is not
    applied.
    """
    entropy_delta: Annotated[float, Needs("entropy_target")] = Field(1e-4, gt=0)
    """Change of the entropy coefficient per step with entropy_target."""
    entropy_max: Annotated[float, Needs("entropy_target")] = Field(5e-3, gt=0)
    """Maximum entropy coefficient with entropy_target."""
    correct_nll_coef: float = Field(0.0, ge=0)
    """Add this weight times the mean negative log-likelihood of correct responses to the loss (VAPO, with 0.1). Needs a
    verifier in reward_funcs.
    """
    observation_nll_coef: Annotated[float, Needs("environment", when="plays_episodes")] = Field(0.0, ge=0)
    """Add this weight times the mean negative log-likelihood of observations to the loss, so that the policy learns to
    predict the environment's replies to its turns (ECHO). 0.05 is a start.
    """
    mask_truncated: bool = False
    """Exclude responses truncated at max_new_tokens from training. Their scores still count in their group."""
    rollout_correction: RolloutCorrection = "token_clip"
    """Importance-sampling correction for the mismatch between rollout-engine and trainer probabilities."""
    rollout_correction_range: Annotated[
        tuple[float, float], Needs("rollout_correction", ("token_mask", "seq_mask"))
    ] = (0.5, 5.0)
    """Accepted trainer-to-engine ratios: per token with token_mask, per sequence (geometric mean) with seq_mask."""
    rollout_correction_cap: Annotated[float, Needs("rollout_correction", ("token_clip",))] = Field(2.0, gt=0)
    """Maximum ratio with token_clip."""
    rollout_routing_replay: bool = False
    """When the actor computes log-probs, send each token to the experts that the rollout engine chose (R3). For
    mixture-of-experts models with a high rollout_k3.
    """

    @property
    def selects_tokens(self) -> bool:
        """Whether the loss treats some tokens differently, chosen among all tokens of an optimizer step."""
        return self.top_entropy_quantile < 1 or self.policy_loss in ("clip_cov", "kl_cov")

    @property
    def eps_clip_low(self) -> float:
        """Lower clip range of the ratio."""
        return self.eps_clip if self.eps_clip_low_high is None else self.eps_clip_low_high[0]

    @property
    def eps_clip_high(self) -> float:
        """Upper clip range of the ratio."""
        return self.eps_clip if self.eps_clip_low_high is None else self.eps_clip_low_high[1]

    @property
    def dppo_limits(self) -> tuple[float, float]:
        """Largest divergence of tokens that became less and more likely, for the dppo losses."""
        default = DPPO_DELTA.get(self.policy_loss, 0.0)
        return (default, default) if self.dppo_delta_low_high is None else self.dppo_delta_low_high

    @model_validator(mode="after")
    def _check_ranges(self) -> "PolicyConfig":
        # Both forms of the setting give these two values.
        low, high = self.eps_clip_low, self.eps_clip_high
        if not (0 < low <= 1 and high > 0):
            raise ValueError(f"clip range {low:g} below and {high:g} above 1: requires 0 < below <= 1 and above > 0")
        low, high = self.rollout_correction_range
        # The ratio is 1 on-policy, which must never be corrected.
        if not 0 <= low < 1 < high:
            raise ValueError(f"rollout_correction_range {low:g} {high:g} must contain 1")
        if min(self.sapo_tau) <= 0:
            raise ValueError(f"sapo_tau {self.sapo_tau[0]:g} {self.sapo_tau[1]:g}: both must be above 0")
        if min(*self.vespo_k, *self.vespo_lambda) <= 0:
            raise ValueError("vespo_k and vespo_lambda: all must be above 0")
        low, high = self.clip_cov_range
        if not 0 <= low < high:
            raise ValueError(f"clip_cov_range {low:g} {high:g}: requires 0 <= first < second")
        return self

    @model_validator(mode="after")
    def _check_trust_region(self) -> "PolicyConfig":
        if self.dppo_delta_low_high is None:
            return self
        low, high = self.dppo_delta_low_high
        if min(low, high) <= 0:
            raise ValueError(f"dppo_delta_low_high {low:g} {high:g}: both must be above 0")
        if self.policy_loss == "dppo_tv" and max(low, high) >= 1:
            raise ValueError(
                f"dppo_delta_low_high {low:g} {high:g}: both must be below 1, the largest difference of probabilities"
            )
        return self

    @model_validator(mode="after")
    def _check_observations(self) -> "PolicyConfig":
        if self.observation_nll_coef and self.selects_tokens:
            raise ValueError(
                "observation_nll_coef does not support policy_loss clip_cov and kl_cov, or top_entropy_quantile below 1"
            )
        return self

    @model_validator(mode="after")
    def _check_kl(self) -> "PolicyConfig":
        if self.kl_target is not None and not self.init_kl_coef:
            raise ValueError("kl_target adapts init_kl_coef, but with init_kl_coef 0 no KL divergence is computed")
        if self.use_kl_loss and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 in the loss has a gradient with zero expectation: with use_kl_loss, set k2 or k3"
            )
        if self.entropy_target is not None and self.entropy_loss_coef > self.entropy_max:
            raise ValueError(f"entropy_loss_coef {self.entropy_loss_coef:g} exceeds entropy_max {self.entropy_max:g}")
        return self
