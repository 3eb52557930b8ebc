"""Formulas of policy losses, corrections and means with the numbers of one token filled in, for `rlhf why`.

Formulas of advantages are with their estimators (estimators/). Each is a list of lines: the formula, the same with
numbers, and the paper.
"""

from collections.abc import Callable, Mapping, Sequence
from math import exp
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.advantages import whiten_moments
from rlhf_cli.algorithms.estimators.estimator import Estimator, Experience
from rlhf_cli.algorithms.groups import STD_EPS, group_normalised, scale_of
from rlhf_cli.algorithms.policy_loss import binary_kl
from rlhf_cli.algorithms.ragged import segment_ids
from rlhf_cli.config.policy import PolicyConfig

Values = Mapping[str, float]
"""Columns of one token in a trace (token_trace.py)."""


def number(value: float) -> str:
    """Format a number with six significant digits."""
    return f"{value + 0.0:.6g}"  # no "-0"


def group_of(rewards_B: Tensor, groups_B: Tensor, sample: int) -> tuple[list[float], int]:
    """Return the rewards of the responses to the same prompt, and the sample's place in them."""
    places = (groups_B == groups_B[sample]).nonzero().squeeze(1).tolist()
    return [float(rewards_B[place]) for place in places], places.index(sample)


def shown_group(rewards: Sequence[float], place: int) -> str:
    """Return the line with the rewards of a group; the one at `place` in brackets."""
    marked = [f"[{number(one)}]" if index == place else number(one) for index, one in enumerate(rewards)]
    return f"rewards of the group: {' '.join(marked)}"


def less_mean_formula(experience: Experience, sample: int) -> list[str]:
    """Return the formula of the reward minus the group's mean."""
    rewards, place = group_of(experience.rewards_B, experience.groups_B, sample)
    own, mean = rewards[place], fmean(rewards)
    return [shown_group(rewards, place), f"A = R - mean = {number(own)} - {number(mean)} = {number(own - mean)}"]


def normalised_formula(
    rewards_B: Tensor, groups_B: Tensor, sample: int, *, scale: float | None = None
) -> tuple[list[str], float]:
    """Return the formula of `group_normalised` for a response, and its value."""
    rewards, place = group_of(rewards_B, groups_B, sample)
    value = float(group_normalised(rewards_B, groups_B, scale=scale)[sample])
    eps = STD_EPS * (scale_of(rewards_B) if scale is None else scale)
    std = stdev(rewards) if len(rewards) > 1 else 0.0
    quotient = f"({number(rewards[place])} - {number(fmean(rewards))}) / ({number(std)} + {number(eps)})"
    lines = [shown_group(rewards, place), f"A = (R - mean) / (std + eps) = {quotient} = {number(value)}"]
    return lines, value


def advantage_formula(
    estimator: Estimator, experience: Experience, settings: Any, *, sample: int, token: int
) -> list[str]:
    """Return the formula of an estimator for a token, before whitening."""
    if estimator.formula is None:
        return [f"A from {estimator.name}"]
    return estimator.formula(experience, settings, sample, token)


def whitening_formula(raw_N: Tensor, experience: Experience, *, place: int) -> str:
    """Return the formula of whitening for the token at `place` of raw advantages `raw_N`."""
    trained_N = experience.trained_B[segment_ids(experience.cu, len(raw_N))]
    mean, root = map(float, whiten_moments(raw_N[trained_N], scale=experience.scale))
    value = (float(raw_N[place]) - mean) / root if trained_N[place] else 0.0
    return (
        f"whitened over {int(trained_N.sum())} tokens: (A - mean) / sqrt(var + eps) = ({number(float(raw_N[place]))} - "
        f"{number(mean)}) / {number(root)} = {number(value)}"
    )


def loss_formula(settings: PolicyConfig, values: Values) -> list[str]:
    """Return the formula of the policy loss for a token."""
    explain = _LOSSES.get(settings.policy_loss)
    return (
        [f"loss from {settings.policy_loss} = {number(values['loss'])}"]
        if explain is None
        else explain(settings, values)
    )


def _clip(settings: PolicyConfig, values: Values) -> list[str]:
    ratio, advantage = values["ratio"], values["advantage"]
    low, high = 1 - settings.eps_clip_low, 1 + settings.eps_clip_high
    clipped = min(max(ratio, low), high)
    lines = [
        f"loss = -min(r A, clip(r, {number(low)}, {number(high)}) A) = -min({number(ratio * advantage)}, "
        f"{number(clipped * advantage)}) = {number(values['loss'])}",
        _bound(values, low=low, high=high),
    ]
    if settings.dual_clip is not None and settings.policy_loss == "clip":
        bound = f"A < 0: the loss is at most {number(settings.dual_clip)} x -A (arXiv 1912.09729)"
        lines.append(f"{bound}{', which applies: no gradient' if values['clip_dual'] else ''}")
    paper = "PPO, arXiv 1707.06347, eq. 7" if settings.policy_loss == "clip" else "GSPO, arXiv 2507.18071, eq. 13"
    return [*lines, paper]


def _bound(values: Values, *, low: float, high: float) -> str:
    if values["clip_low"]:
        return f"A < 0 and r below {number(low)}: clipped, no gradient"
    if values["clip_high"]:
        return f"A > 0 and r above {number(high)}: clipped, no gradient"
    return "not clipped"


def _cispo(settings: PolicyConfig, values: Values) -> list[str]:
    highest = settings.cispo_eps_high
    capped = f"capped at {number(highest)}" if values["clip_high"] else "not capped"
    return [
        f"loss = -min(r, {number(highest)}) A log-prob = -{number(min(values['ratio'], highest))} x "
        f"{number(values['advantage'])} x {number(values['logprob'])} = {number(values['loss'])}; r is {capped}",
        "CISPO, arXiv 2506.13585, eq. 4",
    ]


def _sapo(settings: PolicyConfig, values: Values) -> list[str]:
    tau = settings.sapo_tau[0] if values["advantage"] > 0 else settings.sapo_tau[1]
    return [
        f"loss = -(4 / tau) sigmoid(tau (r - 1)) A with tau {number(tau)} = {number(values['loss'])}",
        "SAPO, arXiv 2511.20347, eq. 5",
    ]


def _dppo(settings: PolicyConfig, values: Values) -> list[str]:
    low, high = settings.dppo_limits
    p, q = exp(values["logprob"]), exp(values["rollout"])
    if settings.policy_loss == "dppo_tv":
        apart = f"p - q = {number(p)} - {number(q)} = {number(p - q)}, limits -{number(low)} and {number(high)}"
    else:
        divergence = float(binary_kl(torch.tensor(values["rollout"]), torch.tensor(values["logprob"])))
        apart = (
            f"q log(q / p) + (1 - q) log((1 - q) / (1 - p)) with p {number(p)}, q {number(q)} = {number(divergence)}, "
            f"limits {number(low)} if p falls and {number(high)} if it rises"
        )
    ratio, advantage = number(values["ratio"]), number(values["advantage"])
    stopped = values["clip_low"] or values["clip_high"]
    return [
        f"loss = {number(values['loss'])}: beyond the limit, no gradient"
        if stopped
        else f"loss = -r A = -{ratio} x {advantage} = {number(values['loss'])}",
        f"probabilities p of the model and q of the engine: {apart}",
        "DPPO, arXiv 2602.04879",
    ]


def _gmpo(settings: PolicyConfig, values: Values) -> list[str]:
    bound = number(settings.gmpo_log_clip)
    clipped = f"log-ratio beyond {bound}: clipped, no gradient"
    return [
        f"loss = -g A = -{number(values['ratio'])} x {number(values['advantage'])} = {number(values['loss'])}",
        clipped if values["clip_low"] or values["clip_high"] else "not clipped",
        "GMPO, arXiv 2507.20673",
    ]


def _topr(settings: PolicyConfig, values: Values) -> list[str]:
    weight = min(values["ratio"], 1.0) if values["advantage"] < 0 else 1.0
    kind = f"min(s, 1) = {number(weight)}" if values["advantage"] < 0 else "1 for A > 0"
    return [
        f"loss = -w A log-prob with w = {kind}: -{number(weight)} x {number(values['advantage'])} x "
        f"{number(values['logprob'])} = {number(values['loss'])}",
        "TOPR, arXiv 2503.14286",
    ]


def _vespo(settings: PolicyConfig, values: Values) -> list[str]:
    side = 1 if values["advantage"] < 0 else 0
    k, decay, w = settings.vespo_k[side], settings.vespo_lambda[side], values["ratio"]
    phi = w**k * exp(decay * (1 - w))
    return [
        f"loss = -phi A log-prob = -{number(phi)} x {number(values['advantage'])} x {number(values['logprob'])} = "
        f"{number(values['loss'])}",
        f"phi = w^{number(k)} exp({number(decay)} (1 - w)), w = {number(w)}",
        "VESPO, arXiv 2602.10693",
    ]


def _clip_cov(settings: PolicyConfig, values: Values) -> list[str]:
    low, high = settings.clip_cov_range
    paper = f"Clip-Cov, arXiv 2505.22617, among covariances from {number(low)} to {number(high)}"
    if values.get("covariant"):
        return [f"loss = {number(values['loss'])}: drawn by its covariance of log-prob and advantage", paper]
    return [*_clip(settings, values)[:-1], paper]


def _kl_cov(settings: PolicyConfig, values: Values) -> list[str]:
    ratio, advantage = number(values["ratio"]), number(values["advantage"])
    penalty, coef = "", number(settings.kl_cov_coef)
    if values.get("covariant"):
        penalty = f" + {coef} x {number(abs(values['logprob'] - values['anchor']))}"
    return [
        f"loss = -r A{' + c |log-prob - old|' if penalty else ''} = -{ratio} x {advantage}{penalty} = "
        f"{number(values['loss'])}",
        f"KL-Cov, arXiv 2505.22617: c = {coef} for the highest covariances of log-prob and advantage",
    ]


def _reinforce_loss(settings: PolicyConfig, values: Values) -> list[str]:
    return [
        f"loss = -A log-prob = -{number(values['advantage'])} x {number(values['logprob'])} = {number(values['loss'])}"
    ]


_LOSSES: dict[str, Callable[[PolicyConfig, Values], list[str]]] = {
    "clip": _clip,
    "gspo": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo_tv": _dppo,
    "dppo_kl": _dppo,
    "gmpo": _gmpo,
    "topr": _topr,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "vespo": _vespo,
    "reinforce": _reinforce_loss,
}


def ratio_formula(settings: PolicyConfig, values: Values) -> str:
    """Return the formula of the probability ratio for a token."""
    ratio = number(values["ratio"])
    if settings.policy_loss == "gspo":
        return f"r = exp(mean over the response of (log-prob - old)) = {ratio}"
    if settings.policy_loss == "gmpo":
        return f"g = exp(mean over the response of the clipped log-prob - old) = {ratio}"
    if settings.policy_loss == "vespo":
        return f"w = exp(sum over the response of (log-prob - old)) = {ratio}"
    if settings.policy_loss == "topr":
        return f"s = exp(sum over the response of (log-prob - old)) = {ratio}"
    return f"r = exp(log-prob - old) = exp({number(values['logprob'])} - {number(values['anchor'])}) = {ratio}"


def correction_formula(settings: PolicyConfig, values: Values) -> str:
    """Return the formula of the rollout correction for a token."""
    kind, weight = settings.rollout_correction, number(values["weight"])
    exponent = f"exp(old - engine) = exp({number(values['anchor'])} - {number(values['rollout'])})"
    limit = settings.off_policy_mask_threshold
    if limit is not None and kind in ("off", "token_clip") and values["advantage"] < 0 and not values["weight"]:
        return (
            f"w = 0: A < 0, and the model's log-probs of the response are below the engine's by more than "
            f"{number(limit)} nats per token (arXiv 2512.02556, eq. 9)"
        )
    if values.get("kept", 1.0) == 0:
        fraction = number(settings.top_entropy_quantile)
        return f"w = 0: the entropy is not among the highest {fraction} of the step (arXiv 2506.01939)"
    if kind == "off":
        return "w = 1 (rollout_correction off)"
    if kind == "token_clip":
        cap = f", capped at {number(settings.rollout_correction_cap)}" if values["corrected"] else ""
        return f"w = {exponent} = {weight}{cap} (truncated importance sampling)"
    low, high = settings.rollout_correction_range
    gate = "the ratio of the token" if kind == "token_mask" else "the mean ratio of the response"
    outside = f": {gate} is outside {number(low)} to {number(high)}" if values["corrected"] else ""
    return f"w = {exponent} = {weight}{outside} ({kind})"


def mean_formula(
    settings: PolicyConfig,
    *,
    num_tokens: int,
    num_sequences: int,
    length: int,
    max_new_tokens: int,
    prompts: tuple[float, float] = (0.0, 0.0),
) -> str:
    """Return the weight of a token in the mean of an optimizer step.

    Args:
        num_tokens, num_sequences: in the step.
        length: trained tokens of the sequence.
        prompts: number of prompts in the step, and tokens of the token's prompt, for `prompt_mean`.
    """
    if settings.loss_agg == "token_mean":
        return f"1 / {num_tokens} tokens of the step"
    if settings.loss_agg == "prompt_mean":
        return f"1 / ({number(prompts[0])} prompts of the step x {prompts[1]:.0f} tokens of this one)"
    if settings.loss_agg == "seq_mean":
        return f"1 / ({num_sequences} responses of the step x {length} tokens of this one)"
    return f"1 / ({num_sequences} responses of the step x max_new_tokens {max_new_tokens})"
