"""Pairwise preference losses (DPO and variants), one table row each.

A loss returns one value per pair; the optimizer step loss is the sum over all pairs in the step divided by the number
of pairs. Some losses couple the pairs in a step: `aot` sorts, `bco_pair` has a baseline. Such values are constants in
`PairLogprobs`, computed for the full step in a no-grad pass (`aot_partners`, `implicit_rewards`), so micro-batching
changes neither loss nor gradient.

Notation: `h_c = chosen - ref_chosen` and `h_r = rejected - ref_rejected` are log-ratios summed over tokens, and `d =
h_c - h_r`; `|c|` and `|r|` are trained token counts; `s` is the logistic function. With another `f_divergence_type`
than reverse KL, `f'(exp(h))` replaces `h` in the losses that read the setting (arXiv 2309.16240). The caller adds the
optional NLL term on chosen responses, because it is a token mean; only `orpo` includes an NLL term.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_cli.algorithms.aggregation import Metrics
from rlhf_cli.algorithms.ragged import segment_ids, segment_lengths
from rlhf_cli.algorithms.reward_model import reward_metrics
from rlhf_cli.config.plugins import is_target, load_target
from rlhf_cli.config.preference import PAIR_LOSSES, FDivergence, StepConstant
from rlhf_cli.errors import RunError

# Replaces label smoothing 0 in exo_pair, which needs a target that is not one-hot. TRL uses this value on the EXO
# author's advice.
_EXO_LABEL_SMOOTHING = 1e-3

# Clamp log-probs to this value before computing odds: closer to 0, float32 odds have no usable gradient.
_MAX_ODDS_LOGPROB = -1e-6

_MAX_EXPONENT = 40.0
"""Largest exponent in a score. ipo squares exp(40), which is 5e34 and near the largest float32."""


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Log-probs for B pairs, float `[B]`, summed over the trained tokens of each response.

    - `chosen_logprobs`, `rejected_logprobs`: under the model, with gradient.
    - `ref_chosen_logprobs`, `ref_rejected_logprobs`: under the reference, without gradient; None if no loss needs a
      reference.
    - `chosen_lengths`, `rejected_lengths`: trained token counts.
    - `aot_partner`, `bco_delta`: step constants, None if no loss needs them. `bco_delta` may be a scalar for all pairs.

    Example for one pair with responses of 3 and 5 trained tokens: `chosen_logprobs` is `[-4.2]`, the sum of 3 token
    log-probs, and `chosen_lengths` is `[3.0]`.
    """

    chosen_logprobs: Tensor
    rejected_logprobs: Tensor
    ref_chosen_logprobs: Tensor | None
    ref_rejected_logprobs: Tensor | None
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    aot_partner: Tensor | None = None
    bco_delta: Tensor | float | None = None


@dataclass(frozen=True, slots=True)
class PreferenceSettings:
    """Loss hyperparameters. Each table row lists the ones it reads.

    - `label_smoothing`: assumed fraction of pairs with swapped labels, below 0.5.
    - `simpo_gamma`: target reward margin between chosen and rejected response.
    - `discopop_tau`: blend temperature, at most 1; above 1 the loss grows exponentially.
    - `orpo_lambda`: odds-ratio weight relative to the NLL.
    - `f_divergence_type`, `f_alpha_divergence_coef`: the divergence from the reference.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    discopop_tau: float = 0.05
    orpo_lambda: float = 0.1
    f_divergence_type: FDivergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5

    def __post_init__(self) -> None:
        if not self.beta > 0.0:
            raise ValueError(f"beta must be above 0, not {self.beta}")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be at least 0 and below 0.5, not {self.label_smoothing}")
        if not 0.0 < self.discopop_tau <= 1.0:
            raise ValueError(f"discopop_tau must be above 0 and at most 1, not {self.discopop_tau}")


_PreferenceFunction = Callable[[PairLogprobs, PreferenceSettings], Tensor]


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """A pairwise loss.

    - `settings`: names in `PreferenceSettings` that affect the loss.
    - `needs_reference`: whether reference log-probs are required.
    - `step_constant`: additional required field in `PairLogprobs`.
    """

    name: str
    function: _PreferenceFunction
    settings: frozenset[str]
    needs_reference: bool = True
    step_constant: StepConstant | None = None


def log_ratios(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    """Compute (h_c, h_r), both `[B]`: response log-probs minus reference log-probs."""
    assert pairs.ref_chosen_logprobs is not None, "this needs a reference"
    assert pairs.ref_rejected_logprobs is not None, "this needs a reference"
    return pairs.chosen_logprobs - pairs.ref_chosen_logprobs, pairs.rejected_logprobs - pairs.ref_rejected_logprobs


def sigmoid_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `-(1 - e) log s(beta d) - e log s(-beta d)`, with label smoothing e.

    DPO for e = 0 (arXiv 2305.18290, eq. 7), otherwise cDPO (ericmitchell.ai/cdpo.pdf, eq. 3).
    """
    return _smoothed(settings.beta * _difference(pairs, settings), settings.label_smoothing)


def ipo_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `(h_c / |c| - h_r / |r| - 1 / (2 beta))^2`, arXiv 2310.12036, eq. 17, with beta as tau.

    The paper uses sums. This code averages over length like TRL, which cites confirmation by the authors.
    """
    chosen_B, rejected_B = _averaged(pairs, *_scores(pairs, settings))
    return (chosen_B - rejected_B - 0.5 / settings.beta).square()


def hinge_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `max(0, 1 - beta d)`: the SLiC-HF hinge (arXiv 2305.10425) on log-ratios, as in RSO (2309.06657)."""
    return torch.relu(1.0 - settings.beta * _difference(pairs, settings))


def robust_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute the rDPO loss (arXiv 2403.00409) with label smoothing e.

    `(-(1 - e) log s(beta d) + e log s(-beta d)) / (1 - 2 e)`. If a fraction e of the pairs is swapped, the mean is the
    DPO loss on the true labels. It may be negative.
    """
    scaled_B, e = settings.beta * _difference(pairs, settings), settings.label_smoothing
    return (e * logsigmoid(-scaled_B) - (1.0 - e) * logsigmoid(scaled_B)) / (1.0 - 2.0 * e)


def sppo_hard_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `(h_c - 1 / (2 beta))^2 + (h_r + 1 / (2 beta))^2`: SPPO, arXiv 2405.00675, eq. 4.7, with eta = 1 / beta.

    Hard: the chosen response wins with probability 1, instead of a probability from a preference model.
    """
    chosen_B, rejected_B = log_ratios(pairs)
    target = 0.5 / settings.beta
    return (chosen_B - target).square() + (rejected_B + target).square()


def nca_pair_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `-log s(beta h_c) - log s(-beta h_c) / 2 - log s(-beta h_r) / 2`: NCA for pairs, arXiv 2402.05369."""
    chosen_B, rejected_B = _rewards(pairs, settings.beta)
    return -logsigmoid(chosen_B) - 0.5 * logsigmoid(-chosen_B) - 0.5 * logsigmoid(-rejected_B)


def exo_pair_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute the EXO-pref loss for two responses (arXiv 2402.00856, eq. 16).

    With `q = s(beta d)`: `q log(q / (1 - e)) + (1 - q) log((1 - q) / e)`, the KL divergence of the model's choice from
    labels smoothed by e. Without smoothing it is infinite, so e = 0 is replaced by 1e-3.
    """
    scaled_B, e = settings.beta * _difference(pairs, settings), settings.label_smoothing or _EXO_LABEL_SMOOTHING
    right_B = torch.sigmoid(scaled_B) * (logsigmoid(scaled_B) - math.log1p(-e))
    return right_B + torch.sigmoid(-scaled_B) * (logsigmoid(-scaled_B) - math.log(e))


def apo_zero_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `1 - s(beta h_c) + s(beta h_r)`: APO-zero, arXiv 2408.06266, eq. 7.

    Use it if chosen responses are better than model output: raises the chosen, lowers the rejected response.
    """
    chosen_B, rejected_B = _rewards(pairs, settings.beta)
    return torch.sigmoid(-chosen_B) + torch.sigmoid(rejected_B)


def apo_down_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `s(beta h_c) + 1 - s(beta d)`: APO-down, arXiv 2408.06266, eq. 8.

    Use it if chosen responses are worse than model output: lowers both, the rejected response more.
    """
    chosen_B, rejected_B = _rewards(pairs, settings.beta)
    return torch.sigmoid(chosen_B) + torch.sigmoid(rejected_B - chosen_B)


def bco_pair_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `-log s(beta h_c - delta) - log s(-(beta h_r - delta))`: BCO on pairs, arXiv 2404.04656.

    `delta` (`pairs.bco_delta`) is the mean implicit reward over all chosen and rejected responses in the step, without
    gradient. The paper and TRL keep a running mean, which would add state to checkpoints.
    """
    assert pairs.bco_delta is not None, "bco_pair needs the step's delta"
    delta = pairs.bco_delta.detach() if isinstance(pairs.bco_delta, Tensor) else pairs.bco_delta
    chosen_B, rejected_B = _rewards(pairs, settings.beta)
    return -logsigmoid(chosen_B - delta) - logsigmoid(delta - rejected_B)


def aot_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `-(1 - e) log s(beta (u - v')) - e log s(-beta (u - v'))`: AOT on pairs, arXiv 2406.05882.

    `u = chosen - rejected` under the model and `v = ref_chosen - ref_rejected`. The paper sorts both over the pairs and
    compares equal ranks, so that u stochastically dominates v. Here `v'` (`pairs.aot_partner`) is the v with the same
    rank as u among all pairs in the step. v has no gradient and ranks are constant, so value and gradient equal the
    sorted form exactly, pair by pair.
    """
    assert pairs.aot_partner is not None, "aot needs the partners from the whole step"
    margin_B = pairs.chosen_logprobs - pairs.rejected_logprobs - pairs.aot_partner
    return _smoothed(settings.beta * margin_B, settings.label_smoothing)


def discopop_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `-(1 - m) log s(x) + m exp(-x)`, `x = beta d`, `m = s(x / tau)`: DiscoPOP, arXiv 2406.08414, eq. 5."""
    scaled_B, tau = settings.beta * _difference(pairs, settings), settings.discopop_tau
    logistic_B = -torch.sigmoid(-scaled_B / tau) * logsigmoid(scaled_B)
    # m exp(-x) as one exponential: for very negative x, m is 0 and exp(-x) is infinite.
    return logistic_B + torch.exp(logsigmoid(scaled_B / tau) - scaled_B)


def sigmoid_norm_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `-log s(beta (h_c / |c| - h_r / |r|))`, smoothed like `sigmoid`: length-normalized DPO, arXiv 2411.15124.

    Per-token log-ratios are small, so beta is larger than in DPO: Tulu 3 uses 5.
    """
    chosen_B, rejected_B = _averaged(pairs, *_scores(pairs, settings))
    return _smoothed(settings.beta * (chosen_B - rejected_B), settings.label_smoothing)


def simpo_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `-log s(beta (chosen / |c| - rejected / |r|) - gamma)`: reference-free SimPO, arXiv 2405.14734, eq. 6.

    Per-token log-probs are small: the paper uses beta 2 to 10 and gamma 0.1 to 0.8 times beta. TRL subtracts gamma /
    beta inside the beta bracket, which is equivalent.
    """
    chosen_B, rejected_B = _averaged(pairs, pairs.chosen_logprobs, pairs.rejected_logprobs)
    return -logsigmoid(settings.beta * (chosen_B - rejected_B) - settings.simpo_gamma)


def orpo_loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute `-a_c - lambda log s(log odds(a_c) - log odds(a_r))`: reference-free ORPO, arXiv 2403.07691, eq. 6 and 7.

    `a_c = chosen / |c|`, `a_r = rejected / |r|`, `odds(a) = exp(a) / (1 - exp(a))`. The NLL is averaged over each
    response, then over pairs, like the odds; TRL averages it over all tokens in the batch.
    """
    chosen_B, rejected_B = _averaged(pairs, pairs.chosen_logprobs, pairs.rejected_logprobs)
    log_odds_ratio_B = chosen_B - rejected_B - (_log_complement(chosen_B) - _log_complement(rejected_B))
    return -chosen_B - settings.orpo_lambda * logsigmoid(log_odds_ratio_B)


# Cached: every micro-batch looks up its losses by name.
@cache
def preference_loss(name: str) -> PreferenceLoss:
    """Return the built-in or user-defined loss with this name. Raises ValueError for an unknown name.

    A user-defined function reads all settings and receives reference log-probs; a `PreferenceLoss` declares its
    requirements.
    """
    row = PAIR_LOSSES.get(name)
    if row is not None:
        return PreferenceLoss(name, load_target(row.function), row.settings, row.needs_reference, row.step_constant)
    if not is_target(name):
        raise ValueError(f"the preference loss must be one of {', '.join(PAIR_LOSSES)}, not {name!r}")
    loaded = load_target(name)
    if isinstance(loaded, PreferenceLoss):
        return replace(loaded, name=name, function=_checked(name, loaded.function))
    return PreferenceLoss(name, _checked(name, loaded), frozenset(field.name for field in fields(PreferenceSettings)))


def preference_losses(names: Sequence[str]) -> list[PreferenceLoss]:
    """Return the losses with these names, in order. Raises ValueError for an unknown name."""
    return [preference_loss(name) for name in names]


def _checked(name: str, function: _PreferenceFunction) -> _PreferenceFunction:
    """Wrap a user-defined loss: raise RunError unless it returns one value per pair."""

    def loss(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
        found_B = function(pairs, settings)
        if not isinstance(found_B, Tensor) or found_B.shape != pairs.chosen_logprobs.shape:
            raise RunError(f"--loss {name} must return a tensor with one loss per pair")
        return found_B

    return loss


def mixed_loss(
    names: Sequence[str], weights: Sequence[float], pairs: PairLogprobs, settings: PreferenceSettings
) -> Tensor:
    """Compute the weighted sum of losses per pair, `[B]`, as in MPO (arXiv 2411.10442). Weights need not sum to 1."""
    if len(names) != len(weights) or not names:
        raise ValueError(f"every preference loss needs one weight: there are {len(names)} and {len(weights)}")
    rows = preference_losses(names)
    weighted = [weight * row.function(pairs, settings) for row, weight in zip(rows, weights, strict=True)]
    return torch.stack(weighted).sum(dim=0)


def aot_partners(pairs: PairLogprobs) -> Tensor:
    """Return for each pair the `ref_chosen - ref_rejected` with the same rank, `[B]`, without gradient, for `aot`."""
    assert pairs.ref_chosen_logprobs is not None, "aot needs a reference"
    assert pairs.ref_rejected_logprobs is not None, "aot needs a reference"
    # Stable, so equal margins get the same partners in every run.
    order_B = (pairs.chosen_logprobs - pairs.rejected_logprobs).detach().argsort(stable=True)
    sorted_B = (pairs.ref_chosen_logprobs - pairs.ref_rejected_logprobs).detach().sort().values
    partners_B = torch.empty_like(sorted_B)
    partners_B[order_B] = sorted_B
    return partners_B


def implicit_rewards(pairs: PairLogprobs, *, beta: float) -> tuple[Tensor, Tensor]:
    """Compute implicit rewards (chosen_B, rejected_B) without gradient.

    With a reference: `beta (logprobs - ref)`, summed over tokens (arXiv 2305.18290, eq. 5). Without one: `beta logprobs
    / length`, the SimPO reward (arXiv 2405.14734, eq. 4).
    """
    if pairs.ref_chosen_logprobs is None:
        chosen_B, rejected_B = _averaged(pairs, pairs.chosen_logprobs, pairs.rejected_logprobs)
    else:
        chosen_B, rejected_B = log_ratios(pairs)
    return beta * chosen_B.detach(), beta * rejected_B.detach()


def preference_metrics(pairs: PairLogprobs, *, beta: float, num_pairs: int) -> Metrics:
    """Compute partial step means of the implicit rewards, the margin and the accuracy."""
    chosen_B, rejected_B = implicit_rewards(pairs, beta=beta)
    return reward_metrics(chosen_B, rejected_B, num_pairs=num_pairs)


def _rewards(pairs: PairLogprobs, beta: float) -> tuple[Tensor, Tensor]:
    """Compute implicit rewards with gradient."""
    chosen_B, rejected_B = log_ratios(pairs)
    return beta * chosen_B, beta * rejected_B


def _scores(pairs: PairLogprobs, settings: PreferenceSettings) -> tuple[Tensor, Tensor]:
    """Compute (h_c, h_r), or `f'(exp(h))` of both for another divergence f than reverse KL (arXiv 2309.16240)."""
    chosen_B, rejected_B = log_ratios(pairs)
    return divergence_score(chosen_B, settings), divergence_score(rejected_B, settings)


def divergence_score(log_ratios_B: Tensor, settings: PreferenceSettings) -> Tensor:
    """Compute `f'(t)` for `t = exp(h)`, up to a constant, which cancels between both responses.

    - reverse_kl, `f = t log t`: `h`
    - forward_kl, `f = -log t`: `1 - exp(-h)`
    - js_divergence: `log 2 + log s(h)`
    - alpha_divergence with a: `(exp((a - 1) h) - 1) / (a - 1)`; forward KL for a = 0, reverse KL for a = 1
    """
    if settings.f_divergence_type == "js_divergence":
        return math.log(2) + logsigmoid(log_ratios_B)
    powers = {"reverse_kl": 0.0, "forward_kl": -1.0, "alpha_divergence": settings.f_alpha_divergence_coef - 1.0}
    power = powers[settings.f_divergence_type]
    if power == 0:
        return log_ratios_B
    # Sums over long responses would overflow in float32, and the step would be skipped.
    return torch.expm1((power * log_ratios_B).clamp(max=_MAX_EXPONENT)) / power


def _difference(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Compute d, or the difference of the scores under another divergence.

    The reference is subtracted per response first: the magnitudes are similar and cancel with less rounding.
    """
    chosen_B, rejected_B = _scores(pairs, settings)
    return chosen_B - rejected_B


def length_weights(cu: Tensor, num_tokens: int, *, ld_alpha: float) -> Tensor:
    """Return a weight per token, `[K]`: `ld_alpha` beyond the length of the pair's other response, otherwise 1.

    LD-DPO, arXiv 2409.06411. The segments `cu` alternate between chosen and rejected responses.
    """
    lengths_B = segment_lengths(cu)
    shared_B = lengths_B.unflatten(0, (-1, 2)).amin(1).repeat_interleave(2)
    segment_K = segment_ids(cu, num_tokens)
    place_K = torch.arange(num_tokens, device=cu.device) - cu[segment_K]
    return torch.where(place_K < shared_B[segment_K], 1.0, ld_alpha)


def _averaged(pairs: PairLogprobs, chosen_B: Tensor, rejected_B: Tensor) -> tuple[Tensor, Tensor]:
    """Convert sums over tokens to means; 0 for a response without trained tokens."""
    return chosen_B / pairs.chosen_lengths.clamp(min=1.0), rejected_B / pairs.rejected_lengths.clamp(min=1.0)


def _smoothed(scaled_B: Tensor, label_smoothing: float) -> Tensor:
    """Compute `-(1 - e) log s(x) - e log s(-x)`."""
    return -(1.0 - label_smoothing) * logsigmoid(scaled_B) - label_smoothing * logsigmoid(-scaled_B)


def _log_complement(logprobs_B: Tensor) -> Tensor:
    """Compute `log(1 - exp(logprobs))`. Near probability 1 it stays finite and has no gradient."""
    return torch.log(-torch.expm1(logprobs_B.clamp(max=_MAX_ODDS_LOGPROB)))
